"""The blocks of code on Polar's pages, each with the mark that stands before it. Runs nothing.

A mark is an HTML comment right before a block:

    <!-- file: agent.py -->                       the reader saves the block under this name
    <!-- needs: gpu -->                           one of NEEDS: it cannot run on every machine
    <!-- shown only: fragment -->                 one of SHOWN: it is not for running
    <!-- run by: tests/e2e/test_up.py::test_x --> another test runs it; `ci`: CI's own script does

A block without a mark runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
NEEDS = {
    "gpu": "an accelerator, and a real engine on it",
    "engine": "a real inference server",
    "docker": "a Docker daemon",
    "network": "a package index or another host",
    "nodes": "more than one machine",
    "root": "changes to the machine itself",
    "trainer": "a trainer's own package",
    "quiet": "a machine of its own for minutes: benchmarks",
}
SHOWN = {
    "fragment": "a part of a file that the reader has",
    "foreign": "a file of another program",
    "kept running": "the test has started this itself",
    "without end": "ends with Ctrl-C only",
    "stopped": "wants Polar stopped",
}
RUN = ("sh", "python")
CHECKED = ("yaml", "json")
QUIET = ("text", "{toctree}", "{mermaid}")
"""Blocks that are no code: outputs, pictures, directives."""
MARK = re.compile(r"<!--\s*(file|needs|shown only|run by):\s*(.+?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    kind: str = ""
    """Of its mark; empty without one."""
    value: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether this is to be run, written or checked by the test."""
        return self.language in (*RUN, *CHECKED) and self.kind in ("", "file")


def pages() -> list[Path]:
    """Every page that a reader follows; the reference is written from the code and has tests of its own."""
    written = [path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts]
    return sorted([ROOT / "README.md", *written, *(ROOT / "examples").glob("*/README.md")])


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order; an indented one has no language."""
    kind = value = ""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "html_block":
            found = MARK.search(token.content)
            kind, value = (found[1], found[2]) if found else ("", "")
        elif token.type in ("fence", "code_block"):
            language = token.info.split()[0] if token.info.strip() else ""
            yield Block(page, (token.map or [0])[0] + 1, language, token.content, kind, value)
            kind = value = ""
        else:  # a mark counts for the very next block
            kind = value = ""
