"""The sweeper: frees what dead workers held, ends what is overdue, wakes what was forgotten, numbers what ended.

Runs every few seconds from beat; harmless when several run at once (rows are locked, moves are guarded).
"""

from __future__ import annotations

import logging
from functools import partial

from sqlalchemy import Engine

from polar import lanes, lifecycle, placement, recording
from polar.db import after_commit, transaction
from polar.delivery import feed
from polar.dispatch import Dispatcher
from polar.errors import NodeError
from polar.lifecycle import State
from polar.log import line

logger = logging.getLogger(__name__)


def sweep(database: Engine, dispatcher: Dispatcher) -> dict[str, int]:
    """One round; how many sessions were freed, ended and woken."""
    counts = {"freed": _free(database, dispatcher), "overdue": 0, "woken": 0, "unplaced": 0}
    with transaction(database) as db:
        late = lifecycle.overdue(db)
        for session in late:
            lifecycle.time_out(db, session)
        counts["overdue"] = len(late)
    with transaction(database) as db:
        counts["unplaced"] = placement.unplace_dead_lanes(db)
        for session in lifecycle.unwoken(db):
            after_commit(db, partial(dispatcher.wake, session.id, session.stage, str(session.lane)))
            counts["woken"] += 1
        names = [lane.name for lane in lanes.alive(db)]
        lanes.swept(db)
    counts["numbered"] = feed.number_ended(database)
    for name in names:
        dispatcher.look(name)
    if any(counts.values()):
        logger.info(line("swept", **counts))
    return counts


def _free(database: Engine, dispatcher: Dispatcher) -> int:
    with transaction(database) as db:
        sessions = lifecycle.expired(db)
        for session in sessions:
            if recording.is_recording(session):
                recording.close_session(db, session, "timed_out", "it was not closed in its time")
            else:
                said = f"worker {session.worker} stopped renewing its lease in {session.stage}"
                lifecycle.retry(db, session, NodeError(said, code="lost_worker"))
            if session.state == State.QUEUED:
                after_commit(db, partial(dispatcher.wake, session.id, session.stage, str(session.lane)))
    return len(sessions)
