"""What every stage is given and gives back, and the paths and variables of a session.

Holds no stage's own work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar.db import transaction
from polar.lifecycle import held_row
from polar.models import RolloutSession, now
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
    handles: dict[str, Any] = field(default_factory=dict)
    """The session's runtimes as this stage leaves them; starts as the row's."""

    def __post_init__(self) -> None:
        self.handles = dict(self.session.runtimes)

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
        left = max(0.0, (self.session.deadline_at - now()).total_seconds()) if self.session.deadline_at else None
        bounds = [bound for bound in (left, seconds) if bound is not None]
        return Limits(min(bounds) if bounds else None, self.cancelled)

    @property
    def out_of_time(self) -> bool:
        return self.session.deadline_at is not None and self.session.deadline_at <= now()

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
