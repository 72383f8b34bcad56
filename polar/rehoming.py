"""Sessions whose lane is gone go elsewhere: the sweeper's answer to a node that was cut off, or an engine that is down.

A session that has not begun only loses its place. One that has begun is done again from prewarm, as another attempt,
once somebody else can take it; what it left on its old node waits there in `leftovers`. Who is not replaced waits: a
node that is started again finds its sessions as they were. The move itself is `lifecycle`'s.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, delete, func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.types import Text

from polar import lanes, lifecycle
from polar.errors import NodeError
from polar.lifecycle import BEFORE_RECONSTRUCT, CLOCK, LANE_ALIVE_SECONDS, Stage, State, rowcount
from polar.models import Lane, Node, RolloutSession, Task, TraceRow, TrajectoryRow

PATIENCE_SECONDS = 60.0
"""How long a node is waited for that holds an agent's finished work, and a lane whose engine is down by those who are
ready to execute there."""
NEVER_SECONDS = 600.0
"""A lane that was away for so long does not come back, even if its node is there."""
AT_ONCE = 200
"""Sessions that one round moves."""


def unplace(db: Session) -> int:
    """Sessions that have not begun, on a lane that is gone or whose engine is down, go back to the pool; how many."""
    gone = select(Lane.name).where(
        or_(_silent(Lane.heartbeat_at, LANE_ALIVE_SECONDS), Lane.engine_down_since.is_not(None))
    )
    return rowcount(
        db.execute(
            update(RolloutSession)
            .where(
                RolloutSession.state == State.QUEUED,
                RolloutSession.stage == Stage.PREWARM,
                RolloutSession.lane.in_(gone),
                RolloutSession.runtimes == {},
            )
            .values(lane=None, node_id=None)
        )
    )


def rehome(db: Session) -> int:
    """Begin anew elsewhere what waits for a lane that is gone; how many."""
    others = [lane.name for lane in lanes.takers(db)]
    if not others:
        return 0
    waiting = (
        select(RolloutSession)
        .join(Task, Task.id == RolloutSession.task_pk)
        .join(Lane, Lane.name == RolloutSession.lane)
        .join(Node, Node.id == Lane.node_id)
        .where(
            RolloutSession.state == State.QUEUED,
            RolloutSession.ended_at.is_(None),
            or_(_lost_early(), _lost_late()),
            _may_go_to(others),
        )
        .order_by(RolloutSession.id)
        .limit(AT_ONCE)
        .with_for_update(skip_locked=True, of=RolloutSession)
    )
    sessions = list(db.scalars(waiting))
    ids = [session.id for session in sessions]
    for kind in (TraceRow, TrajectoryRow) if ids else ():
        db.execute(delete(kind).where(kind.session_id.in_(ids)))  # of the attempt that is given up
    for session in sessions:
        said = f"lane {session.lane} of node {session.node_id} is gone; the session begins again elsewhere"
        lifecycle.rehome(db, session, NodeError(said, code="lost_node"))
    return len(sessions)


def _silent(
    heartbeat: ColumnElement[datetime] | InstrumentedAttribute[datetime], seconds: float
) -> ColumnElement[bool]:
    return heartbeat < CLOCK - timedelta(seconds=seconds)


def _lost_early() -> ColumnElement[bool]:
    """Nothing is lost with these but a prepared runtime."""
    engine_stays_down = and_(
        Lane.engine_down_since < CLOCK - timedelta(seconds=PATIENCE_SECONDS), RolloutSession.stage == Stage.EXECUTE
    )
    gone = _silent(Lane.heartbeat_at, LANE_ALIVE_SECONDS)
    return and_(RolloutSession.stage.in_(BEFORE_RECONSTRUCT), or_(gone, engine_stays_down))


def _lost_late() -> ColumnElement[bool]:
    """With these an agent's whole work is lost, since its runtime is on the node: that is waited for."""
    away = and_(_silent(Lane.heartbeat_at, PATIENCE_SECONDS), _silent(Node.heartbeat_at, LANE_ALIVE_SECONDS))
    return and_(
        RolloutSession.stage.not_in(BEFORE_RECONSTRUCT),
        or_(away, _silent(Lane.heartbeat_at, NEVER_SECONDS)),
    )


def _may_go_to(names: list[str]) -> ColumnElement[bool]:
    asked = Task.spec["lanes"]
    allowed = func.jsonb_exists_any(asked, literal(names, ARRAY(Text)))
    return or_(asked == literal(None, Task.spec.type), allowed)
