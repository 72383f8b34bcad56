"""A progress bar of sessions that have ended; without rich, or not wanted, nothing at all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class Progress(AbstractContextManager["Progress"]):
    """Counts sessions and shows their mean reward."""

    def __init__(self, shown: bool) -> None:
        self._bar: Any = _bar() if shown else None
        self._line = self._bar.add_task("sessions", total=0, reward="") if self._bar else None
        self.total = self.ended = 0
        self._rewards, self._rewarded = 0.0, 0

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def expect(self, sessions: int) -> None:
        """So many more are under way."""
        self.total += sessions
        self._show()

    def end(self, reward: float | None) -> None:
        """One has ended."""
        self.ended += 1
        if reward is not None:
            self._rewards += reward
            self._rewarded += 1
        self._show()

    def _show(self) -> None:
        if self._bar:
            mean = f"mean reward {self._rewards / self._rewarded:.3f}" if self._rewarded else ""
            self._bar.update(self._line, total=self.total, completed=self.ended, reward=mean)


def _bar() -> Any:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(*columns, TextColumn("{task.fields[reward]}"))
