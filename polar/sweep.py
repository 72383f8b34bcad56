"""The sweeper: frees what dead workers held, ends what is overdue, moves what lost its node, wakes what was forgotten,
numbers what ended.

Runs every few seconds from beat; harmless when several run at once (rows are locked, moves are guarded).
"""

from __future__ import annotations

import logging
from functools import partial

from sqlalchemy import Engine, case, select
from sqlalchemy.orm import Session

from polar import lanes, lifecycle, placement, recording, rehoming
from polar.db import after_commit, transaction
from polar.delivery import feed
from polar.dispatch import Dispatcher
from polar.errors import NodeError
from polar.lifecycle import CLOCK, SESSION_CLOCK, Stage, State
from polar.log import line
from polar.models import TAKEN, RolloutSession

logger = logging.getLogger(__name__)


def sweep(database: Engine, dispatcher: Dispatcher) -> dict[str, int]:
    """One round; how many sessions were freed, ended and woken."""
    counts = {"freed": _free(database, dispatcher), "overdue": 0, "woken": 0}
    with transaction(database) as db:
        late = overdue(db)
        for session in late:
            lifecycle.time_out(db, session)
        counts["overdue"] = len(late)
    with transaction(database) as db:
        counts["unplaced"] = rehoming.unplace(db)
        counts["rehomed"] = rehoming.rehome(db)
    with transaction(database) as db:
        for session in placement.unwoken(db):
            after_commit(db, partial(dispatcher.wake, session.id, session.stage, str(session.lane)))
            counts["woken"] += 1
        names = [lane.name for lane in lanes.takers(db)]
        lanes.swept(db)
    counts["numbered"] = feed.number_ended(database)
    for name in names:
        dispatcher.look(name)
    if any(counts.values()):
        logger.info(line("swept", **counts))
    return counts


def _free(database: Engine, dispatcher: Dispatcher) -> int:
    with transaction(database) as db:
        sessions = expired(db)
        for session in sessions:
            if recording.is_recording(session):
                recording.close_session(db, session, "timed_out", "it was not closed in its time")
            else:
                said = f"worker {session.worker} stopped renewing its lease in {session.stage}"
                lifecycle.retry(db, session, NodeError(said, code="lost_worker"))
            if session.state == State.QUEUED:
                after_commit(db, partial(dispatcher.wake, session.id, session.stage, str(session.lane)))
    return len(sessions)


def expired(db: Session) -> list[RolloutSession]:
    """Running sessions whose worker stopped renewing, locked for the caller."""
    return list(
        db.scalars(
            select(RolloutSession)
            .where(
                TAKEN,
                RolloutSession.state == State.RUNNING,
                # A recording's lease is its whole time, and stands still with it.
                RolloutSession.lease_until < case((RolloutSession.worker.is_(None), SESSION_CLOCK), else_=CLOCK),
            )
            .with_for_update(skip_locked=True)
            .limit(200)
        )
    )


def overdue(db: Session) -> list[RolloutSession]:
    """Queued sessions past their deadline, locked for the caller. Running ones are their worker's to end."""
    return list(
        db.scalars(
            select(RolloutSession)
            .where(
                TAKEN,
                RolloutSession.state == State.QUEUED,
                RolloutSession.stage != Stage.RECONSTRUCT,
                RolloutSession.deadline_at < SESSION_CLOCK,
            )
            .with_for_update(skip_locked=True)
            .limit(200)
        )
    )
