"""Placement is pull: a lane with room takes the best queued session, and from then on the session is pinned to it.

Sets only lane, node and wake-up times; stage and state are `lifecycle`'s alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import and_, func, not_, select, update
from sqlalchemy.orm import Session

from polar.lifecycle import BEFORE_RECONSTRUCT, Stage, State, record
from polar.models import TAKEN, Lane, Node, RolloutSession, now
from polar.statements import PLACE

REWAKE_SECONDS = 10.0
"""A queued row whose last wake-up is older gets another: an emptied broker heals itself."""
SPARE = 32
"""Sessions that are looked at beyond the room there is: lanes that look at the same moment lock the first ones."""


def place(db: Session, lane_name: str) -> list[str]:
    """Pin the best queued sessions to a lane that has room; their ids, best first.

    Higher priority, then fair shares between tasks, then oldest. The lane's row lock makes room exact. A lane whose
    engine is down takes nothing, and neither does a node that drains."""
    lane = db.scalar(select(Lane).where(Lane.name == lane_name).with_for_update())
    if lane is None or lane.engine_down_since is not None:
        return []
    if db.scalar(select(Node.draining).where(Node.id == lane.node_id)):
        return []
    held = db.scalar(
        select(func.count())
        .select_from(RolloutSession)
        .where(
            TAKEN,
            RolloutSession.lane == lane_name,
            RolloutSession.stage.in_(BEFORE_RECONSTRUCT),
            not_(and_(RolloutSession.state == State.RUNNING, RolloutSession.worker.is_(None))),  # only recorded
        )
    )
    room = lane.max_execute + lane.ready_buffer - (held or 0)
    if room <= 0:
        return []
    values = {"stage": Stage.PREWARM, "state": State.QUEUED, "lane": lane_name}
    ids = list(db.scalars(PLACE, {**values, "room": room, "looked_at": room + SPARE}))
    if ids:
        placed = db.execute(
            update(RolloutSession)
            .where(RolloutSession.id.in_(ids))
            .values(lane=lane_name, node_id=lane.node_id, woken_at=now())
            .returning(RolloutSession.id, RolloutSession.attempt)
        )
        attempts = dict(placed.all())
        for attempt in set(attempts.values()):  # one, but for sessions that come from other nodes
            these = [each for each in ids if attempts[each] == attempt]
            record(db, these, "place", Stage.PREWARM, State.QUEUED, attempt, note={"lane": lane_name})
    return ids


def unwoken(db: Session) -> list[RolloutSession]:
    """Placed, queued sessions whose last wake-up is old: marked woken now, for the caller to send."""
    before = now() - timedelta(seconds=REWAKE_SECONDS)
    sessions = list(
        db.scalars(
            select(RolloutSession)
            .where(
                TAKEN,
                RolloutSession.state == State.QUEUED,
                RolloutSession.lane.is_not(None),
                RolloutSession.woken_at < before,
            )
            .order_by(RolloutSession.priority.desc(), RolloutSession.queued_at)
            .with_for_update(skip_locked=True)
            .limit(500)
        )
    )
    for session in sessions:
        session.woken_at = now()
    return sessions


def waiting_to_execute(db: Session, lane: str, limit: int = 1) -> Sequence[str]:
    """Sessions of this lane that are ready and only lack room, best first."""
    return db.scalars(
        select(RolloutSession.id)
        .where(
            TAKEN,
            RolloutSession.lane == lane,
            RolloutSession.stage == Stage.EXECUTE,
            RolloutSession.state == State.QUEUED,
        )
        .order_by(RolloutSession.priority.desc(), RolloutSession.queued_at)
        .limit(limit)
    ).all()
