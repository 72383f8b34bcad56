"""Reading the tables for the doors: what the API, the pages and the CLI show. Changes nothing."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from polar.errors import NotFoundError
from polar.lifecycle import BEFORE_RECONSTRUCT, Stage, State
from polar.models import (
    TAKEN,
    Completion,
    Lane,
    Node,
    RolloutSession,
    SessionEvent,
    Task,
    TraceRow,
    TrajectoryRow,
)


def task(db: Session, task_id: str) -> Task:
    """The current task of that name. Raises NotFoundError."""
    found = db.scalar(select(Task).where(Task.task_id == task_id, Task.current))
    if found is None:
        raise NotFoundError(f"no task {task_id!r}")
    return found


def session(db: Session, session_id: str) -> RolloutSession:
    """Raises NotFoundError."""
    found = db.get(RolloutSession, session_id)
    if found is None:
        raise NotFoundError(f"no session {session_id!r}")
    return found


def sessions_of(
    db: Session, task_pk: uuid.UUID, *, after: int = -1, limit: int | None = None, ended: bool = False
) -> Sequence[RolloutSession]:
    """In the order of their numbers, from the one that follows `after` on; `ended`: only those that have."""
    wanted = [RolloutSession.task_pk == task_pk, RolloutSession.number > after]
    if ended:
        wanted.append(RolloutSession.ended_at.is_not(None))
    return db.scalars(select(RolloutSession).where(*wanted).order_by(RolloutSession.number).limit(limit)).all()


def recent_sessions(db: Session, task_id: str | None, limit: int) -> Sequence[RolloutSession]:
    """Newest first."""
    query = select(RolloutSession).join(Task).order_by(RolloutSession.created_at.desc(), RolloutSession.id).limit(limit)
    if task_id is not None:
        query = query.where(Task.task_id == task_id)
    return db.scalars(query).all()


def trajectories_of(db: Session, ids: Sequence[str]) -> dict[str, tuple[TrajectoryRow, list[TraceRow]]]:
    """Trajectories with their traces, by session id."""
    rows = db.scalars(select(TrajectoryRow).where(TrajectoryRow.session_id.in_(ids)))
    found: dict[str, tuple[TrajectoryRow, list[TraceRow]]] = {row.session_id: (row, []) for row in rows}
    traces = select(TraceRow).where(TraceRow.session_id.in_(ids)).order_by(TraceRow.session_id, TraceRow.number)
    for trace in db.scalars(traces):
        found[trace.session_id][1].append(trace)
    return found


def trajectory_of(db: Session, session_id: str) -> TrajectoryRow | None:
    """The trajectory without its traces; None if none was built."""
    return db.get(TrajectoryRow, session_id)


def events_of(db: Session, session_id: str) -> Sequence[SessionEvent]:
    return db.scalars(select(SessionEvent).where(SessionEvent.session_id == session_id).order_by(SessionEvent.id)).all()


def completions_of(db: Session, session_id: str, after: int = 0, limit: int = 100) -> Sequence[Completion]:
    """In the order in which they were requested, from `after` (a seq) on."""
    return db.scalars(
        select(Completion)
        .where(Completion.session_id == session_id, Completion.seq > after)
        .order_by(Completion.seq)
        .limit(limit)
    ).all()


def task_rows(
    db: Session, *, state: str | None, harness: str | None, since: float | None, limit: int
) -> list[dict[str, Any]]:
    """Tasks with their sessions counted, newest first."""
    ended_well = func.count(case((RolloutSession.state == State.COMPLETED, 1)))
    ended_badly = func.count(case((RolloutSession.state.in_([State.FAILED, State.TIMED_OUT, State.CANCELLED]), 1)))
    counts = (
        select(
            RolloutSession.task_pk,
            ended_well.label("completed"),
            ended_badly.label("errored"),
            func.avg(RolloutSession.reward).label("mean_reward"),
            func.avg(RolloutSession.turns).label("mean_completions"),
        )
        .group_by(RolloutSession.task_pk)
        .subquery()
    )
    query = select(Task, counts).join(counts, counts.c.task_pk == Task.id).where(Task.current)
    if state:
        query = query.where(Task.state == state)
    if harness:
        query = query.where(Task.spec["agent"]["harness"].astext == harness)
    if since is not None:
        query = query.where(Task.created_at >= datetime.fromtimestamp(since, UTC))
    found = []
    for row in db.execute(query.order_by(Task.created_at.desc()).limit(limit)):
        found.append({"task": row[0], **row._mapping})
    return found


def mean_traces(db: Session, task_pks: Sequence[uuid.UUID]) -> dict[uuid.UUID, float]:
    """Traces per session that has any."""
    per_session = (
        select(RolloutSession.task_pk, TraceRow.session_id, func.count().label("n"))
        .join(RolloutSession, RolloutSession.id == TraceRow.session_id)
        .where(RolloutSession.task_pk.in_(task_pks))
        .group_by(RolloutSession.task_pk, TraceRow.session_id)
        .subquery()
    )
    rows = db.execute(select(per_session.c.task_pk, func.avg(per_session.c.n)).group_by(per_session.c.task_pk))
    return {pk: float(mean) for pk, mean in rows}


def open_sessions(db: Session) -> int:
    return db.scalar(select(func.count()).select_from(RolloutSession).where(RolloutSession.ended_at.is_(None))) or 0


def nodes(db: Session, node_id: str | None = None) -> Sequence[Node]:
    query = select(Node).order_by(Node.id)
    return db.scalars(query.where(Node.id == node_id) if node_id else query).all()


def lanes(db: Session) -> Sequence[Lane]:
    return db.scalars(select(Lane).order_by(Lane.name)).all()


def loads(db: Session) -> dict[str, dict[tuple[str, str], int]]:
    """Open sessions of each node by (stage, state)."""
    rows = db.execute(
        select(RolloutSession.node_id, RolloutSession.stage, RolloutSession.state, func.count())
        .where(TAKEN, RolloutSession.node_id.is_not(None))
        .group_by(RolloutSession.node_id, RolloutSession.stage, RolloutSession.state)
    )
    found: dict[str, dict[tuple[str, str], int]] = {}
    for node_id, stage, state, count in rows:
        found.setdefault(str(node_id), {})[stage, state] = count
    return found


def counts_at(load: dict[tuple[str, str], int]) -> dict[str, int]:
    """One node's load in the original's six numbers (NodeStageMetrics)."""

    def total(state: State, *stages: Stage) -> int:
        return sum(load.get((stage, state), 0) for stage in stages)

    after = [stage for stage in Stage if stage not in BEFORE_RECONSTRUCT]
    return {
        "init_queue_depth": total(State.QUEUED, Stage.PREWARM),
        "init_inflight": total(State.RUNNING, Stage.PREWARM),
        "ready_depth": total(State.QUEUED, Stage.EXECUTE),
        "run_inflight": total(State.RUNNING, Stage.EXECUTE),
        "postrun_queue_depth": total(State.QUEUED, *after),
        "postrun_inflight": total(State.RUNNING, *after),
    }
