"""How tests ended, as pytest prints it: one line for each, beginning with PASSED, FAILED, ERROR or SKIPPED.

Whether the lines are to be believed, and what they are worth, is each evaluator's affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

ENDS = ("PASSED", "FAILED", "ERROR", "SKIPPED")
COLOUR = re.compile(r"\x1b\[[0-9;]*m|\r")


def parse_ends(output: str) -> dict[str, str]:
    """Short test name to how it ended; where a test is named twice, the later line counts."""
    return {name: end for end, test in _lines(output) if (name := short_name(test))}


def contradictions(output: str) -> list[str]:
    """Whole node ids that are said to have passed as well as failed: no runner says so of one test."""
    ends: dict[str, set[str]] = {}
    for end, test in _lines(output):
        ends.setdefault(test.split(" - ")[0].strip(), set()).add(end)
    return sorted(test for test, found in ends.items() if "::" in test and {"PASSED", "FAILED"} <= found)


def _lines(output: str) -> Iterator[tuple[str, str]]:
    for raw in output.splitlines():
        words = COLOUR.sub("", raw).split(maxsplit=1)
        if len(words) == 2 and words[0].startswith(ENDS):
            yield words[0], words[1].strip()


def short_name(test: str) -> str:
    """`Class.method` or `function` of a pytest node id, without the reason that may follow it."""
    parts = test.split(" - ")[0].split("::")
    return ".".join(parts[-2:]) if len(parts) >= 3 else parts[-1]
