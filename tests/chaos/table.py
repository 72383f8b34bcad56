"""The table of docs/reliability.md: what the suite saw of each fault, as it saw it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- chaos table: begin -->", "<!-- chaos table: end -->"
HEAD = "| fault | struck in | outcome | tried again | answers seen and kept | seconds longer |"


@dataclass(frozen=True)
class Line:
    """One row."""

    fault: str
    when: str
    outcome: str
    again: int
    seen: int
    seconds: float


LINES: list[Line] = []


def rows() -> str:
    """The whole table."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for each in LINES:
        cells = (each.fault, each.when, each.outcome, each.again, each.seen, f"{max(0.0, each.seconds):.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write(page: Path) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{rows()}\n{END}{after}")
