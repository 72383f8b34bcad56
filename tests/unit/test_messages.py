"""What of a system message changes by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar.messages import VOLATILE, steady

WORDS = (
    *("today's date", "todays date", "Today is", "CURRENT DATETIME", "current", "local day", "date and time", "date"),
    *("the time is", "datE iſ", "now:", "know:", "x-billing-header: 1", "ß", "İ", " ", "\r", "\n", "\n\n", "\u2028"),
)


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_lines_that_tell_the_time(text: str) -> None:
    """Just those lines are empty that the pattern finds, whatever was looked for before it."""
    lines = ["" if VOLATILE.search(line) else line for line in text.split("\n")]
    assert steady(text) == "\n".join(lines)
