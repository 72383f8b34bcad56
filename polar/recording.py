"""The bare recorder: a session without an agent of ours, opened and closed over the REST API.

Whoever opens it gets a base URL and a key, runs a harness anywhere, and closes it; from there on it is a session like
any other: reconstructed, evaluated, delivered. No worker holds it meanwhile, so a restart of any of them costs
nothing; one that is never closed is closed when its time is up, with what it has.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from polar import lanes, lifecycle
from polar.errors import ConflictError, HarnessError, NodeError
from polar.lifecycle import Stage, State
from polar.models import TAKEN, Completion, Lane, Node, RolloutSession
from polar.spec import TaskRequest

ANSWERED = ("answered", "aborted")


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that records."""

    session: RolloutSession
    base_url: str
    """Root of the proxy; dialects' paths follow it."""
    api_key: str


def open_session(db: Session, request: TaskRequest, key_id: uuid.UUID | None = None) -> Opened:
    """Persist a task of one session that is executing already, on the lane with the fewest. Raises NodeError."""
    allowed = [lane for lane in lanes.alive(db) if request.lanes is None or lane.name in request.lanes]
    if not allowed:
        raise NodeError("no lane is alive that could record this session", code="no_lane")
    held = _held(db)
    lane = min(allowed, key=lambda each: (held.get(each.name, 0), each.name))
    task = lifecycle.submit(db, request, key_id)
    session = db.scalars(select(RolloutSession).where(RolloutSession.task_pk == task.id)).one()
    key = "sk-polar-" + secrets.token_urlsafe(32)
    lifecycle.adopt(db, session, lane, hashlib.sha256(key.encode()).digest())
    node = db.get_one(Node, lane.node_id)
    return Opened(session, node.gateway_url, key)


def close_session(db: Session, session: RolloutSession, state: str = "completed", why: str | None = None) -> bool:
    """End the recording and queue the session to be reconstructed, or fail it if nothing was recorded.

    False if it was closed before. Raises ConflictError for a session that a worker runs."""
    db.refresh(session, with_for_update=True)
    if not is_recording(session):
        if session.worker is not None or session.stage in lifecycle.BEFORE_RECONSTRUCT and session.ended_at is None:
            raise ConflictError(f"session {session.id} is run by Polar; cancel it instead", code="not_a_recording")
        return False
    agent_exit: dict[str, object] = {"state": state, "exit_code": None, "error": why, "detail": {}}
    if not _calls(db, session):
        message = f"no model call that was answered reached session {session.id} before it was closed"
        error = HarnessError(message, code="no_model_calls", detail={"agent_exit": agent_exit})
        lifecycle.fail(db, session, error, agent_exit=agent_exit)
        return True
    lifecycle.advance(db, session, agent_exit=agent_exit, key_hash=None)
    return True


def is_recording(session: RolloutSession) -> bool:
    """Whether this session is executing with no worker at it."""
    return (session.stage, session.state, session.worker) == (Stage.EXECUTE, State.RUNNING, None)


def _calls(db: Session, session: RolloutSession) -> int:
    return (
        db.scalar(
            select(func.count())
            .select_from(Completion)
            .where(
                Completion.session_id == session.id,
                Completion.attempt == session.attempt,
                Completion.outcome.in_(ANSWERED),
            )
        )
        or 0
    )


def _held(db: Session) -> dict[str, int]:
    rows = db.execute(
        select(Lane.name, func.count(RolloutSession.id))
        .join(RolloutSession, RolloutSession.lane == Lane.name)
        .where(TAKEN)
        .group_by(Lane.name)
    )
    return dict(rows.all())
