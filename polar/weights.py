"""Weight pushes as rows: which lanes' engines are to take which checkpoint, and what became of it.

An engine's address is its node's to know, so the node's proxies do the work; the API asks for it here and waits. A
proxy that dies in the middle is followed by another: taking the same checkpoint twice does no harm. Closing the gate
around it is the API's affair.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from polar.errors import ConflictError
from polar.models import Lane, WeightPush

CHANNEL = "polar_weights"
"""Notified with every push; whoever misses it looks every few seconds."""
CLAIM_SECONDS = 10.0
"""How long a proxy that stopped renewing keeps a push."""


class PushState(StrEnum):
    """Of one lane."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


UNFINISHED = (PushState.QUEUED, PushState.RUNNING)


def begin(db: Session, lanes: Sequence[Lane], version: str, path: str, probe: dict[str, Any] | None) -> uuid.UUID:
    """Ask the nodes of these lanes. Raises ConflictError while another push is under way."""
    db.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": CHANNEL})
    fresh = WeightPush.claimed_at > func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, CLAIM_SECONDS)
    busy = db.scalars(select(WeightPush.lane).where(WeightPush.state == PushState.RUNNING, fresh)).all()
    if busy:
        names = ", ".join(sorted(busy))
        raise ConflictError(f"another push is under way at {names}; push again when it has ended", code="push_running")
    give_up(db, None, "another push came")
    push_id = uuid.uuid4()
    for lane in lanes:
        db.add(
            WeightPush(
                push_id=push_id, lane=lane.name, node_id=lane.node_id, version=version, path=path, probe=probe,
                state=PushState.QUEUED,
            )
        )  # fmt: skip
    db.flush()
    db.execute(text("SELECT pg_notify(:channel, :push)"), {"channel": CHANNEL, "push": str(push_id)})
    return push_id


def outcome(db: Session, push_id: uuid.UUID) -> Sequence[WeightPush]:
    """How far each lane is, by name."""
    return db.scalars(select(WeightPush).where(WeightPush.push_id == push_id).order_by(WeightPush.lane)).all()


def give_up(db: Session, push_id: uuid.UUID | None, reason: str) -> None:
    """Nobody begins or ends what is unfinished of this push; None: of any."""
    values = {"state": PushState.FAILED, "error": reason, "ended_at": func.clock_timestamp()}
    statement = update(WeightPush).where(WeightPush.state.in_(UNFINISHED)).values(values)
    if push_id is not None:
        statement = statement.where(WeightPush.push_id == push_id)
    db.execute(statement.execution_options(synchronize_session=False))
