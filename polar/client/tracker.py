"""Which sessions of a run have been seen: no network here.

Tasks are expected before they are submitted, so a session that ends before its submit was answered is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polar.client.progress import Progress
from polar.client.types import SessionResult


class Tracker:
    """Tells the results of one run from those of others, and knows when all are there."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._left: dict[str, int] = {}
        self._seen: set[str] = set()
        self.all_submitted = False

    def expect(self, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """A task that is about to be submitted; handed through."""
        sessions = int(task.get("num_samples", 1))
        self._left[task["task_id"]] = self._left.get(task["task_id"], 0) + sessions
        self._bar.expect(sessions)
        return task

    def take(self, result: SessionResult) -> bool:
        """Whether this is of the run and new."""
        if not self._left.get(result.task_id) or result.session_id in self._seen:
            return False
        self._seen.add(result.session_id)
        self._left[result.task_id] -= 1
        if not self._left[result.task_id]:
            del self._left[result.task_id]
        self._bar.end(result.reward)
        return True

    @property
    def done(self) -> bool:
        """Everything was submitted and every session has been seen."""
        return self.all_submitted and not self._left
