"""What every stage is given and gives back, and the paths and variables of a session.

Holds no stage's own work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar.db import transaction
from polar.lifecycle import held_row
from polar.models import RolloutSession
from polar.runtimes.base import Limits
from polar.settings import Settings
from polar.spec import RuntimeSpec, TaskRequest
from polar.topology import LaneSpec, NodeSpec


@dataclass(slots=True)
class Job:
    """One claimed session in one stage."""

    session: RolloutSession
    """As it was when claimed: read it, do not change it."""
    task: TaskRequest
    database: Engine
    settings: Settings
    node: NodeSpec
    lane: LaneSpec
    cancelled: threading.Event
    """Set when the lease is lost: cancelled, ended, or taken over."""
    clock: Callable[[], float] = time.monotonic
    """What budgets are counted by: it stands still while the gate is closed."""
    closed_for: float = 0.0
    """How long the gate had been closed when the session was claimed: its deadline counts from that moment."""
    handles: dict[str, Any] = field(default_factory=dict)
    """The session's runtimes as this stage leaves them; starts as the row's."""
    _ends: float | None = field(init=False)
    """When the session's budget is used up, by `clock`."""

    def __post_init__(self) -> None:
        self.handles = dict(self.session.runtimes)
        self._ends = None
        if self.session.deadline_at is not None and self.session.claimed_at is not None:
            # Both are the database's: this node's own time of day does not matter.
            left = (self.session.deadline_at - self.session.claimed_at).total_seconds() + self.closed_for
            self._ends = self.clock() + left

    def keep(self, use: str, handle: dict[str, Any], **values: Any) -> None:
        """Write a runtime's handle, and other columns, to the row. Raises LostLeaseError."""

        def note(db: Session, row: RolloutSession) -> None:
            # From the row, which is locked: another thread may have written the other runtime's.
            row.runtimes = self.handles = {**row.runtimes, use: handle}
            for name, value in values.items():
                setattr(row, name, value)

        self.write(note)

    def limits(self, seconds: float | None = None) -> Limits:
        """What is left of the session's budget, or `seconds` if that is less."""
        left = None if self._ends is None else max(0.0, self._ends - self.clock())
        bounds = [bound for bound in (left, seconds) if bound is not None]
        return Limits(min(bounds) if bounds else None, self.cancelled, self.clock)

    @property
    def out_of_time(self) -> bool:
        return self._ends is not None and self._ends <= self.clock()

    @property
    def folder(self) -> Path:
        """The session's folder on the node; removed when the session ends, but for its logs."""
        return self.settings.workspaces / self.session.id

    @property
    def logs(self) -> Path:
        """Where this attempt's logs are kept."""
        path = self.settings.home_path / "logs" / "sessions" / self.session.id / f"attempt-{self.session.attempt}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def runtime_spec(self) -> RuntimeSpec:
        return self.task.runtime or self.node.default_runtime or RuntimeSpec(backend="local")

    def env(self, workdir: str) -> dict[str, str]:
        """The variables that every command of the session sees."""
        return {
            "SESSION_ID": self.session.id,
            "TASK_ID": self.task.task_id,
            "SESSION_DIR": workdir,
            "INSTRUCTION": self.task.instruction,
            **self.runtime_spec().env,
        }

    def write(self, action: Callable[[Session, RolloutSession], None]) -> None:
        """Write in mid-stage, only while this worker still holds the session. Raises LostLeaseError."""
        with transaction(self.database) as db:
            action(db, held_row(db, self.session))


@dataclass(slots=True)
class Outcome:
    """What a stage found: columns to store with the move, and how to log it in a few words."""

    values: dict[str, Any] = field(default_factory=dict)
    says: str = ""
