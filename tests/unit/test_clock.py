"""The clock of rows: set by the database's answers, carried on by a clock that nobody can set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from polar import clock
from polar.clock import FRESH_SECONDS, Clock

HOUR = timedelta(hours=1)


class Time:
    """A steady clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "steady", time)
    return time


def test_it_goes_on_from_what_the_database_said(steady: Time) -> None:
    """Whatever the machine's own clock shows."""
    found, there = Clock(), datetime.now(UTC) - 5 * HOUR
    assert found.due()
    found.heard(there, steady.now)
    steady.now += 10
    assert found.now() == there + timedelta(seconds=10)
    assert not found.due()
    steady.now += FRESH_SECONDS
    assert found.due()


def test_a_slow_answer_does_not_set_it(steady: Time) -> None:
    """What an answer's journey may explain is no difference; what it cannot is taken over, and no more than that."""
    found, there = Clock(), datetime.now(UTC)
    found.heard(there, steady.now)
    asked = steady.now
    steady.now += 2.0
    found.heard(there + timedelta(seconds=1), asked)
    assert found.now() == there + timedelta(seconds=2)
    asked = steady.now
    steady.now += 2.0
    found.heard(there + HOUR, asked)
    assert found.now() == there + HOUR
