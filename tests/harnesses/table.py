"""The table of docs/harnesses.md: what the suite saw of each harness, as it saw it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- harness table: begin -->", "<!-- harness table: end -->"
HEAD = "| harness | version | dialect | streams | file made | turns chained | side calls | failure shown | passes on |"


@dataclass
class Facts:
    """One row; None where it was not seen."""

    version: str
    dialect: str
    streams: bool
    made: bool | None = None
    chained: str | None = None
    side: str | None = None
    honest: bool | None = None
    extras: str | None = None
    not_run: str | None = None


FACTS: dict[str, Facts] = {}


def rows() -> str:
    """The whole table."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for name, facts in sorted(FACTS.items()):
        start = f"| `{name}` | {facts.version} | {facts.dialect} | {_said(facts.streams)} |"
        if facts.not_run:
            lines.append(f"{start} not run: {facts.not_run} | – | – | – | – |")
        else:
            seen = (facts.made, facts.chained, facts.side, facts.honest, facts.extras)
            lines.append(f"{start} {' | '.join(map(_said, seen))} |")
    return "\n".join(lines)


def write(page: Path) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{rows()}\n{END}{after}")


def _said(value: bool | str | None) -> str:
    if isinstance(value, str):
        return value
    return {True: "yes", False: "no", None: "not seen"}[value]
