"""The time of every row: the database's, carried on by a clock that nobody can set.

A machine's wall clock jumps when somebody sets it, and differs from the next machine's; a lease or a deadline that is
written by one and read by another would run out early, or never. So a process asks the database now and then what time
it is, and counts on from there with its steady clock. Who asks is `db`'s and the proxy's affair: no I/O here.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

QUERY = "SELECT clock_timestamp()"
FRESH_SECONDS = 30.0
"""How long an answer is counted on from: even a bad oscillator strays less than a few milliseconds in that time."""


def steady() -> float:
    """Seconds since some moment, whatever the wall clock does; a machine that was asleep notices, where it can."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Clock:
    """An instant, and what the steady clock showed then."""

    def __init__(self) -> None:
        self._instant = datetime.now(UTC)
        self._since = steady()
        self._heard: float | None = None

    def now(self) -> datetime:
        """The database's time, as far as this process knows; the machine's own until it has asked."""
        return self._instant + timedelta(seconds=steady() - self._since)

    def due(self) -> bool:
        """Whether it is time to ask again."""
        return self._heard is None or steady() - self._heard > FRESH_SECONDS

    def heard(self, instant: datetime, asked: float) -> None:
        """The database said `instant` to a question of that steady time.

        It was that late some time between asking and now, so what lies between is not news: a slow answer does not
        set the clock."""
        at, mine = steady(), self.now()
        latest = instant + timedelta(seconds=at - asked)
        self._instant, self._since = min(max(mine, instant), latest), at
        self._heard = at


CLOCK = Clock()
"""This process's."""


def now() -> datetime:
    """The time, in UTC."""
    return CLOCK.now()
