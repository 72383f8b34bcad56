"""How far behind a trace is: a table of what is known and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from polar.policy import number
from polar.staleness import STALE, UNKNOWN, staleness


def span(version: Any, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "policy", "submitted", "behind", "flag"),
    [
        ([span(10, 0, 8)], "12", None, 2, None),
        ([span("9", 0, 4), span(12, 4, 8)], "12", None, 3, STALE),
        ([span(9, 0, 4), span("default", 4, 8)], "12", 11, 3, STALE),
        ([span("default", 0, 8)], "12", 11, 1, None),
        ([], "12", 9, 3, STALE),
        ([], "12", None, None, UNKNOWN),
        ([span(12, 0, 4)], "12", None, 0, UNKNOWN),
        ([span("step-a", 0, 8)], "12", None, None, UNKNOWN),
        ([span("step-a", 0, 4), span(9, 4, 8)], "12", None, 3, STALE),
        ([span(12, 0, 8)], "step-b", None, None, UNKNOWN),
        ([span(12, 0, 8)], None, None, None, UNKNOWN),
        ([span(12, 0, 8)], "11", None, -1, None),
    ],
)
def test_the_oldest_token_decides(
    spans: Any, policy: Any, submitted: Any, behind: int | None, flag: str | None
) -> None:
    """Too old is stale even if the rest is not known; not known is never taken for fresh, and says why."""
    found = staleness(spans, 8, bound=2, policy_version=policy, submitted_at=submitted)
    assert found is not None
    assert (found.behind, found.flag) == (behind, flag)
    assert (found.reason is not None) == (flag == UNKNOWN or "step-a" in str(spans))


def test_without_a_bound_or_tokens_there_is_nothing_to_say() -> None:
    """Nobody asked, or nothing of it is trained."""
    assert staleness([span(1, 0, 8)], 8, bound=None, policy_version="12") is None
    assert staleness([], 0, bound=0, policy_version="12") is None


def test_only_whole_numbers_are_numbers() -> None:
    """True is no version 1, and digits of other scripts are words."""
    found = [number(version) for version in (3, "3", "-3", True, "3.0", "", "-", "٣", None, 3.0)]
    assert found == [3, 3, -3, None, None, None, None, None, None, None]
