"""Time as sessions count it: it stands still while the gate is closed, so that a pause costs no session its time.

A process hears now and then how long the gate was closed so far, and goes on by its steady clock in between. Who says
so is `polar.policy`. When a session's time is up is a row's affair, and rows go by `polar.clock`: this one only counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from polar.clock import steady


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long the gate was closed until now."""

    seconds: float = 0.0
    """All pauses that are over, together."""
    closed_for: float | None = None
    """How long the pause takes that goes on; None while the gate is open."""


class SessionClock:
    """Seconds that only count while the gate is open; called like `time.monotonic`, by any thread."""

    def __init__(self) -> None:
        self._known: tuple[float, float | None] = 0.0, None
        """Seconds of the pauses that are over, and when the present one began: set and read as one."""

    def heard(self, pauses: Pauses) -> None:
        """Go by this from now on."""
        began = None if pauses.closed_for is None else steady() - pauses.closed_for
        self._known = pauses.seconds, began

    def __call__(self) -> float:
        over, began = self._known
        return (steady() if began is None else began) - over
