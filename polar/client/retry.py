"""How long to try again, and how long to wait in between. Knows nothing of HTTP but status codes.

Everything that the client sends may be sent twice: a submit carries an Idempotency-Key, and the rest changes nothing
the second time. So a lost connection is no reason to give up, only the end of patience is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

AGAIN = frozenset({429, 502, 503})


@dataclass(frozen=True, slots=True)
class Retry:
    """Patience. Seconds count from the first failure of one call; 0 never tries again."""

    unreachable_seconds: float = 60.0
    """While nothing answers, or 502 and 503 do: a restart, a database that is away."""
    busy_seconds: float = 3600.0
    """While the key has as much open as it may have (429)."""
    first_pause: float = 0.1
    """The first pause in seconds; each is twice the one before."""
    longest_pause: float = 10.0


NO_RETRY = Retry(unreachable_seconds=0, busy_seconds=0)


class Attempts:
    """One call's failures so far."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._count = 0
        self._began: float | None = None

    def pause(self, now: float, status: int | None, retry_after: str | None = None) -> float | None:
        """Seconds to wait before the next attempt; None to give up. `status` is None where nothing answered."""
        if status is not None and status not in AGAIN:
            return None
        if self._began is None:
            self._began = now
        patience = self._retry.busy_seconds if status == 429 else self._retry.unreachable_seconds
        left = self._began + patience - now
        if left <= 0:
            return None
        # A random part, so that a thousand clients of one server that restarts do not come back as one.
        pause = min(self._retry.longest_pause, self._retry.first_pause * 2**self._count) * random.uniform(0.5, 1.0)
        self._count = min(self._count + 1, 30)
        if retry_after is not None and retry_after.isdecimal():
            pause = max(pause, float(retry_after))
        return min(pause, left)
