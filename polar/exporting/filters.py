"""Which sessions and traces are exported, and why the others are not. Works on summaries: no token is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from polar.client.types import SessionResult, Trace

ONLY_STALE = frozenset({"stale", "stale_at_delivery"})
"""Rules by which a trace may not train any more and is as good as ever for data that are offline anyway."""


@dataclass(frozen=True, slots=True)
class Filters:
    """What a session, and then each of its traces, must be."""

    min_reward: float | None = None
    """Of the session; one without a reward does not pass."""
    max_reward: float | None = None
    """Of the session."""
    fidelity: tuple[str, ...] = ("exact",)
    """Of the trace; empty: any."""
    harness: tuple[str, ...] = ()
    """Names of the task's harness; empty: any."""
    tasks: tuple[str, ...] = ()
    """Patterns of task ids, as a shell matches file names; empty: any."""
    since: float | None = None
    """Ended at this time or later, in seconds since 1970."""
    until: float | None = None
    """Ended before this time."""
    untrainable: bool = False
    """Also traces that may not train: failed agents, ghosts, quarantined ones."""

    def session(self, result: SessionResult) -> str | None:
        """Why the session is left out; None if it is not."""
        if self.tasks and not any(fnmatchcase(result.task_id, pattern) for pattern in self.tasks):
            return "task"
        if self.harness and result.metadata.get("harness") not in self.harness:
            return "harness"
        if not self._in_time(result.metadata.get("ended_at")):
            return "time"
        if not result.traces:
            return "no trace"
        return self._reward(result.reward) or self._no_trace(result)

    def traces(self, result: SessionResult) -> Iterator[tuple[int, Trace]]:
        """The session's traces that pass, with their numbers."""
        for number, trace in enumerate(result.traces):
            if self._trace(trace) is None:
                yield number, trace

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    def _in_time(self, ended: float | None) -> bool:
        if ended is None:
            return self.since is None and self.until is None
        return (self.since is None or ended >= self.since) and (self.until is None or ended < self.until)

    def _reward(self, reward: float | None) -> str | None:
        if self.min_reward is None and self.max_reward is None:
            return None
        if reward is None:
            return "no reward"
        low = self.min_reward is not None and reward < self.min_reward
        return "reward" if low or (self.max_reward is not None and reward > self.max_reward) else None

    def _no_trace(self, result: SessionResult) -> str | None:
        reasons = [self._trace(trace) for trace in result.traces]
        return None if None in reasons else reasons[0]

    def _trace(self, trace: Trace) -> str | None:
        if self.fidelity and trace.fidelity not in self.fidelity:
            return "fidelity"
        rule = (trace.raw.get("decision") or {}).get("rule")
        if not (self.untrainable or trace.trainable or rule in ONLY_STALE):
            return "not trainable"
        return None
