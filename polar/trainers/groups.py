"""Groups: the sessions of one task, waited for until enough of them have ended. Samples are compared inside a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polar.client.types import SessionResult
from polar.trainers.samples import GroupBy, Sample, samples_of


@dataclass(slots=True)
class Group:
    """What has come of one group so far."""

    group_id: str
    size: int
    """Sessions that it will have."""
    sessions: dict[str, list[Sample]] = field(default_factory=dict)
    """Samples of each session that has ended; an empty list of one that cannot train."""
    results: dict[str, SessionResult] = field(default_factory=dict)
    """The sessions as they came."""

    def add(self, result: SessionResult, samples: list[Sample]) -> None:
        """One session more; the same one twice changes nothing."""
        self.sessions[result.session_id] = samples
        self.results[result.session_id] = result

    @property
    def complete(self) -> bool:
        """Every session has ended."""
        return len(self.sessions) >= self.size

    @property
    def usable(self) -> int:
        """Sessions with a sample."""
        return sum(1 for samples in self.sessions.values() if samples)

    @property
    def accepted_fraction(self) -> float:
        """Of the group's sessions, how many ended as COMPLETED with a sample."""
        done = sum(1 for samples in self.sessions.values() if samples and samples[0].status == "COMPLETED")
        return done / self.size

    def samples(self) -> list[Sample]:
        """All of them, session after session."""
        return [sample for samples in self.sessions.values() for sample in samples]


class Groups:
    """Collects results; hands a group out once, when it is complete."""

    def __init__(self, size: int, *, group_by: GroupBy = "task_id") -> None:
        self._size = size
        self._group_by: GroupBy = group_by
        self._open: dict[str, Group] = {}

    def add(self, result: SessionResult | Mapping[str, Any]) -> Group | None:
        """Take a result; the group that it completed, if any. A result that comes twice changes nothing."""
        ended = result if isinstance(result, SessionResult) else SessionResult.read(dict(result))
        samples = samples_of(ended, group_by=self._group_by)
        named = ended.task_metadata.get("group_id") if self._group_by == "group_id" else None
        name = ended.task_id if named is None else str(named)
        group = self._open.setdefault(name, Group(name, self._size))
        group.add(ended, samples)
        return self._open.pop(name) if group.complete else None

    def give_up(self, group_id: str) -> Group | None:
        """Take a group out as it is: the trainer waits for it no longer."""
        return self._open.pop(group_id, None)

    @property
    def waiting(self) -> list[Group]:
        """Groups that are not complete, oldest first."""
        return list(self._open.values())
