"""The life of a session: the only writer of stage and state.

      stage   prewarm ──▶ execute ──▶ reconstruct ──▶ evaluate
      state   queued ──claim──▶ running ──advance──▶ queued in the next stage, or completed
                 ▲                 │
                 └──────retry──────┤──fail──▶ failed
                                   └──time_out / cancel──▶ timed_out / cancelled   (also from queued)

A failure needs no "failed where": stage stays where it was. Each move is one guarded UPDATE that names the
stage, state and attempt it leaves; no row matched means somebody else moved the session, and the caller
stops (LostLeaseError, or None from `claim`). The same transaction adds a SessionEvent. Nothing is published
here: the caller sends wake-ups after the commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any

from sqlalchemy import CursorResult, Text, Uuid, cast, func, insert, literal, select, update
from sqlalchemy.orm import Session

from polar import tracing
from polar.db import after_commit
from polar.errors import ConflictError, LostLeaseError, NodeError, NotFoundError, SessionError
from polar.models import TAKEN, Delivery, Lane, Leftover, Policy, RolloutSession, SessionEvent, Task, TraceRow, now
from polar.spec import TaskRequest
from polar.statements import CANCEL_OPEN, RENEW

LEASE_SECONDS = 10.0
"""A worker that has not renewed for this long is taken for dead."""
HEARTBEAT_SECONDS = 2.5
MAX_STAGE_ATTEMPTS = 3
LANE_ALIVE_SECONDS = 15.0
MAX_REHOMES = 3
"""A session that was lost with this many nodes is not tried on another."""
CLOCK = func.clock_timestamp()
"""Leases and heartbeats go by the database's clock: nodes need not agree on the time."""
CLOSED_AT = select(Policy.closed_at).scalar_subquery()
SESSION_CLOCK = func.coalesce(CLOSED_AT, CLOCK)
"""Deadlines go by this: while the gate is closed it stands still (`polar.policy`)."""


class Stage(StrEnum):
    """Where a session is."""

    PREWARM = "prewarm"
    """The runtime is being made ready."""
    EXECUTE = "execute"
    """The harness runs."""
    RECONSTRUCT = "reconstruct"
    """Completions become a trajectory."""
    EVALUATE = "evaluate"
    """The trajectory and the runtime get a verdict."""


class State(StrEnum):
    """How a session is doing there."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


STAGES: tuple[Stage, ...] = tuple(Stage)
OPEN = frozenset({State.QUEUED, State.RUNNING})
ENDED = frozenset({State.COMPLETED, State.FAILED, State.TIMED_OUT, State.CANCELLED})
BEFORE_RECONSTRUCT = (Stage.PREWARM, Stage.EXECUTE)


class TaskState(StrEnum):
    """How a task is doing."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def next_stage(stage: str) -> Stage | None:
    """The stage after this one; None after the last."""
    place = STAGES.index(Stage(stage)) + 1
    return STAGES[place] if place < len(STAGES) else None


# ── opening ────────────────────────────────────────────────────────────────────────────────────────


def submit(
    db: Session, request: TaskRequest, key_id: uuid.UUID | None = None, idempotency_key: str | None = None
) -> Task:
    """Persist a task and its sessions, queued. Raises ConflictError while a task of that name runs."""
    holder = db.scalar(select(Task).where(Task.task_id == request.task_id, Task.current).with_for_update())
    if holder is not None:
        if holder.state == TaskState.RUNNING:
            raise ConflictError(f"task_id {request.task_id!r} is still running", code="task_running")
        holder.current = False
        db.flush()  # the partial unique index must see the old row step down before the new one enters
    task = Task(
        task_id=request.task_id,
        state=TaskState.RUNNING,
        spec=request.model_dump(mode="json"),
        priority=request.dispatch_priority,
        num_samples=request.num_samples,
        key_id=key_id,
        idempotency_key=idempotency_key,
        group_id=request.group_id,
    )
    db.add(task)
    db.flush()  # the bulk insert below needs the row it refers to
    _open_sessions(db, task)
    return task


def _open_sessions(db: Session, task: Task) -> None:
    """Two statements, however many sessions: Postgres counts and names them."""
    number = func.generate_series(0, task.num_samples - 1).column_valued("number")
    name = literal("ses-") + func.replace(cast(func.gen_random_uuid(), Text), "-", "")
    queued = {"stage": literal(Stage.PREWARM.value), "state": literal(State.QUEUED.value)}
    common = {"task_pk": literal(task.id, Uuid()), **queued, "priority": literal(task.priority)}
    rows = select(name, number, *common.values())
    db.execute(insert(RolloutSession).from_select(["id", "number", *common], rows))
    event = {"move": literal("open"), **queued, "attempt": literal(1)}
    events = select(RolloutSession.id, *event.values()).where(RolloutSession.task_pk == task.id)
    db.execute(insert(SessionEvent).from_select(["session_id", *event], events.order_by(RolloutSession.number)))


# ── moves ──────────────────────────────────────────────────────────────────────────────────────────


def claim(db: Session, session_id: str, stage: Stage, worker: str, lane: str | None = None) -> RolloutSession | None:
    """queued → running with a lease; None if the message was stale (also: not this `lane`'s), or there is no room."""
    found = db.execute(
        select(RolloutSession, CLOCK, CLOSED_AT)
        .where(RolloutSession.id == session_id)
        .with_for_update(skip_locked=True, of=RolloutSession)
    ).one_or_none()
    if found is None or (found[0].stage, found[0].state) != (stage, State.QUEUED) or lane not in (None, found[0].lane):
        return None
    session, moment, closed_at = found
    if stage is Stage.EXECUTE and not _room_to_execute(db, session.lane):
        return None
    if session.deadline_at is None:
        if closed_at is not None:  # read again, so that the gate cannot open between this and the commit
            closed_at = db.scalar(select(Policy.closed_at).with_for_update(read=True))
        session.deadline_at = (closed_at or moment) + timedelta(seconds=session.task.spec["timeout_seconds"])
    # What was captured is kept, also late.
    if session.deadline_at <= (closed_at or moment) and stage is not Stage.RECONSTRUCT:
        _end(db, session, State.TIMED_OUT, "time_out", _out_of_time(session))
        return None
    timing = dict(session.timing.get(stage, {}))
    timing["queued_ms"] = timing.get("queued_ms", 0) + _ms(session.queued_at, moment)
    values: dict[str, Any] = {
        "state": State.RUNNING,
        "worker": worker,
        "claimed_at": moment,
        "lease_until": moment + timedelta(seconds=LEASE_SECONDS),
        "deadline_at": session.deadline_at,
        "timing": {**session.timing, stage: timing},
    }
    if stage is Stage.EXECUTE:
        values |= {"execute_attempt": session.attempt, "turns": 0, "sampled_tokens": 0}
    _guarded(db, session, values)
    record(db, [session.id], "claim", stage, State.RUNNING, attempt=session.attempt, worker=worker)
    return session


def adopt(db: Session, session: RolloutSession, lane: Lane, key_hash: bytes) -> None:
    """queued in prewarm → running in execute on `lane`, with no worker: its agent runs elsewhere, and holds a key.

    Its lease is its whole time. Its deadline starts when it is closed, for the stages that then follow."""
    moment = now()
    values: dict[str, Any] = {"stage": Stage.EXECUTE, "state": State.RUNNING, "key_hash": key_hash}
    values |= {"lane": lane.name, "node_id": lane.node_id, "execute_attempt": session.attempt, "claimed_at": moment}
    db.execute(select(Policy.id).with_for_update(read=True))  # the gate cannot open between this and the commit
    values["lease_until"] = SESSION_CLOCK + timedelta(seconds=session.task.spec["timeout_seconds"])
    _guarded(db, session, values)
    record(db, [session.id], "adopt", Stage.EXECUTE, State.RUNNING, session.attempt, note={"lane": lane.name})


def advance(db: Session, session: RolloutSession, **values: Any) -> Stage | None:
    """running → queued in the next stage (returned), or completed. `values` are other columns to set."""
    following = next_stage(session.stage)
    if following is None:
        _end(db, session, State.COMPLETED, "advance", None, **values)
        return None
    moment = now()
    left, worker = session.stage, session.worker
    values |= {"timing": _timing_after_run(session, moment), "queued_at": moment, "woken_at": moment}
    values |= {"stage": following, "state": State.QUEUED, "stage_attempts": 1, "lease_until": None, "worker": None}
    _guarded(db, session, values)
    record(db, [session.id], "advance", following, State.QUEUED, session.attempt, worker, {"from": left})
    return following


def retry(db: Session, session: RolloutSession, error: SessionError) -> None:
    """running → queued in the same stage, attempt + 1; fails instead when the attempts are used up."""
    if session.stage_attempts >= MAX_STAGE_ATTEMPTS:
        fail(db, session, error)
        return
    _requeue(db, session, error, session.stage_attempts + 1)


def release(db: Session, session: RolloutSession) -> None:
    """The same because its worker is being stopped: that counts against nobody."""
    _requeue(db, session, NodeError("its worker was stopped", code="worker_stopped"), session.stage_attempts)


def _requeue(db: Session, session: RolloutSession, error: SessionError, stage_attempts: int) -> None:
    moment = now()
    worker, note = session.worker, describe(session, error)
    values: dict[str, Any] = {"timing": _timing_after_run(session, moment), "queued_at": moment, "woken_at": moment}
    values |= {"state": State.QUEUED, "lease_until": None, "worker": None, "key_hash": None}
    values |= {"attempt": session.attempt + 1, "stage_attempts": stage_attempts}
    _guarded(db, session, values)
    record(db, [session.id], "retry", session.stage, State.QUEUED, session.attempt, worker, note)


def rehome(db: Session, session: RolloutSession, error: SessionError) -> None:
    """queued on a lane that is gone → queued in prewarm, on no lane, attempt + 1, with its whole time again.

    What it had on the old node is that node's to remove. Fails instead when it was lost with too many nodes."""
    before = select(func.count()).where(SessionEvent.session_id == session.id, SessionEvent.move == "rehome")
    if (db.scalar(before) or 0) >= MAX_REHOMES:
        fail(db, session, error)
        return
    if session.runtimes:
        left = {"session_id": session.id, "node_id": session.node_id}
        db.execute(insert(Leftover), [{**left, "handle": handle} for handle in session.runtimes.values()])
    note = {**describe(session, error), "lane": session.lane, "node": session.node_id}
    values: dict[str, Any] = {"stage": Stage.PREWARM, "attempt": session.attempt + 1, "stage_attempts": 1}
    values |= {"lane": None, "node_id": None, "runtimes": {}, "agent_exit": None, "execute_attempt": None}
    values |= {"deadline_at": None, "queued_at": now(), "woken_at": None}
    _guarded(db, session, values)
    record(db, [session.id], "rehome", Stage.PREWARM, State.QUEUED, session.attempt, note=note)


def fail(db: Session, session: RolloutSession, error: SessionError, **values: Any) -> None:
    """running → failed."""
    _end(db, session, State.FAILED, "fail", describe(session, error), **values)


def time_out(db: Session, session: RolloutSession, **values: Any) -> None:
    """queued or running → timed_out."""
    _end(db, session, State.TIMED_OUT, "time_out", _out_of_time(session), **values)


def cancel(db: Session, session: RolloutSession, reason: str = "cancelled on request") -> bool:
    """queued or running → cancelled; False if it had ended already."""
    db.refresh(session, with_for_update=True)
    if session.state not in OPEN:
        return False
    error = {"stage": session.stage, "blame": "cancelled", "code": "cancelled", "message": reason}
    _end(db, session, State.CANCELLED, "cancel", error)
    return True


def cancel_task(db: Session, task_id: str) -> Task:
    """Cancel every open session of the current task of that name; idempotent. Raises NotFoundError."""
    task = db.scalar(select(Task).where(Task.task_id == task_id, Task.current).with_for_update())
    if task is None:
        raise NotFoundError(f"no task {task_id!r}")
    if task.state == TaskState.RUNNING:
        task.state = TaskState.CANCELLED
        _cancel_open(db, task, "cancelled on request")
        _settle(db, task)
    return task


def _cancel_open(db: Session, task: Task, reason: str) -> None:
    """Cancel every open session of a locked task: two statements, however many there are."""
    # Locked first, and in the order in which other statements lock several sessions, so that none waits for the other
    # in a ring. A statement of its own, because the one that follows must see what those who held them have written.
    unended = (RolloutSession.task_pk == task.id, RolloutSession.ended_at.is_(None))
    db.execute(select(RolloutSession.id).where(*unended).order_by(RolloutSession.id).with_for_update())
    values = {"task": task.id, "moment": now(), "reason": reason, "state": State.CANCELLED, "running": State.RUNNING}
    ids = db.scalars(CANCEL_OPEN, values).all()
    for each in db.identity_map.values():
        if isinstance(each, RolloutSession) and each.task_pk == task.id:
            db.expire(each)
    for session_id in ids if _owes(task, "session") else ():
        _owe(db, task, "session", session_id)
    if tracing.on():
        for each in db.scalars(select(RolloutSession).where(RolloutSession.id.in_(ids))):
            after_commit(db, partial(tracing.ended, each.id, each.created_at, _facts(each, task), _code(each.error)))


# ── leases ─────────────────────────────────────────────────────────────────────────────────────────


def renew(db: Session, held: Iterable[tuple[str, int]]) -> set[str]:
    """Extend the leases of (session id, attempt) pairs; the ids that are still held."""
    pairs = list(held)
    values = {"ids": [pair[0] for pair in pairs], "attempts": [pair[1] for pair in pairs]}
    return set(db.scalars(RENEW, {**values, "seconds": LEASE_SECONDS, "state": State.RUNNING}))


def held_row(db: Session, session: RolloutSession) -> RolloutSession:
    """The row, locked, if the holder of `session` still holds it. Raises LostLeaseError."""
    row = db.scalar(
        select(RolloutSession)
        .where(
            RolloutSession.id == session.id,
            RolloutSession.attempt == session.attempt,
            RolloutSession.stage == session.stage,
            RolloutSession.state == State.RUNNING,
        )
        .with_for_update()
    )
    if row is None:
        raise LostLeaseError(f"session {session.id} was moved by someone else")
    return row


# ── inside ─────────────────────────────────────────────────────────────────────────────────────────


def describe(session: RolloutSession, error: SessionError) -> dict[str, Any]:
    """A failure as it is stored and shown."""
    return {"stage": session.stage, "blame": error.blame, "code": error.code, "message": error.message, **error.detail}


def _out_of_time(session: RolloutSession) -> dict[str, Any]:
    seconds = session.task.spec["timeout_seconds"]
    message = f"the session's budget of {seconds:g} s ran out in {session.stage}"
    return {"stage": session.stage, "blame": "budget", "code": "session_timeout", "message": message}


def _room_to_execute(db: Session, lane_name: str | None) -> bool:
    lane = db.scalar(select(Lane).where(Lane.name == lane_name).with_for_update())
    if lane is None:
        return True
    if lane.engine_down_since is not None:
        return False
    running = db.scalar(
        select(func.count())
        .select_from(RolloutSession)
        .where(
            TAKEN,
            RolloutSession.lane == lane_name,
            RolloutSession.stage == Stage.EXECUTE,
            RolloutSession.state == State.RUNNING,
            RolloutSession.worker.is_not(None),  # what is only recorded takes no room
        )
    )
    return (running or 0) < lane.max_execute


def _guarded(db: Session, session: RolloutSession, values: dict[str, Any]) -> None:
    moved = db.scalars(
        update(RolloutSession)
        .where(
            RolloutSession.id == session.id,
            RolloutSession.stage == session.stage,
            RolloutSession.state == session.state,
            RolloutSession.attempt == session.attempt,
        )
        .values(**values)
        .returning(RolloutSession)  # and with it the new row, in the object that the caller has
        .execution_options(synchronize_session=False, populate_existing=True)
    ).all()
    if len(moved) != 1:
        raise LostLeaseError(f"session {session.id} was moved by someone else")


def _end(
    db: Session, session: RolloutSession, state: State, move: str, error: dict[str, Any] | None, **values: Any
) -> None:
    # Two last sessions that end at once must not each see the other still open: the task's row serialises them.
    task = db.scalars(select(Task).where(Task.id == session.task_pk).with_for_update()).one()
    moment = now()
    worker = session.worker
    if session.state == State.RUNNING:
        values["timing"] = _timing_after_run(session, moment)
    values |= {"state": state, "error": error, "ended_at": moment}
    values |= {"lease_until": None, "worker": None, "key_hash": None}
    _guarded(db, session, values)
    record(db, [session.id], move, session.stage, state, session.attempt, worker, error or {})
    if tracing.on():
        after_commit(db, partial(tracing.ended, session.id, session.created_at, _facts(session, task), _code(error)))
    _owe(db, task, "session", session.id)
    if state is State.COMPLETED and _enough(db, task):
        _cancel_open(db, task, "enough usable sessions are in")
    _settle(db, task)


def _enough(db: Session, task: Task) -> bool:
    """Whether early_stop_min_usable_sessions is reached; usable means: completed, with a trace that may train."""
    wanted = task.spec.get("early_stop_min_usable_sessions")
    if wanted is None or task.state != TaskState.RUNNING:
        return False
    usable = (
        select(func.count(func.distinct(TraceRow.session_id)))
        .join(RolloutSession, RolloutSession.id == TraceRow.session_id)
        .where(RolloutSession.task_pk == task.id, RolloutSession.state == State.COMPLETED, TraceRow.trainable)
    )
    return (db.scalar(usable) or 0) >= wanted


def _settle(db: Session, task: Task) -> None:
    task.updated_at = now()
    if task.ended_at is not None:
        return
    mine = select(RolloutSession.id).where(RolloutSession.task_pk == task.id)
    # Not counted: the first that is open says enough, and a task of ten thousand asks this ten thousand times.
    if db.scalar(mine.where(RolloutSession.ended_at.is_(None)).limit(1)) is not None:
        return
    task.ended_at = now()
    if task.state == TaskState.RUNNING:
        done = db.scalar(mine.where(RolloutSession.state == State.COMPLETED).limit(1)) is not None
        task.state = TaskState.COMPLETED if done else TaskState.FAILED
    _owe(db, task, "task")


def _owe(db: Session, task: Task, event: str, session_id: str | None = None) -> None:
    """Part of the transaction that ends it: a callback is owed exactly if the end is committed."""
    if _owes(task, event):
        db.add(Delivery(task_pk=task.id, session_id=session_id, url=task.spec["callback_url"]))


def _owes(task: Task, event: str) -> bool:
    return bool(task.spec.get("callback_url")) and event in task.spec.get("callback_events", ("task",))


def _facts(session: RolloutSession, task: Task) -> dict[str, tracing.Value | None]:
    """What the session's span says."""
    return {
        "polar.task": task.task_id,
        "polar.stage": session.stage,
        "polar.state": session.state,
        "polar.lane": session.lane,
        "polar.attempt": session.attempt,
        "polar.turns": session.turns,
        "polar.sampled_tokens": session.sampled_tokens,
        "polar.reward": session.reward,
    }


def _code(error: dict[str, Any] | None) -> str | None:
    return str(error.get("code") or error.get("blame")) if error else None


def _timing_after_run(session: RolloutSession, moment: datetime) -> dict[str, Any]:
    timing = dict(session.timing.get(session.stage, {}))
    timing["run_ms"] = timing.get("run_ms", 0) + _ms(session.claimed_at or moment, moment)
    return {**session.timing, session.stage: timing}


def record(
    db: Session,
    ids: Sequence[str],
    move: str,
    stage: str,
    state: State,
    attempt: int = 1,
    worker: str | None = None,
    note: dict[str, Any] | None = None,
) -> None:
    """Add one event for each session: part of the transaction that moves it."""
    row = {"move": move, "stage": stage, "state": state, "attempt": attempt, "worker": worker, "note": note or {}}
    db.execute(insert(SessionEvent), [{"session_id": session_id, **row} for session_id in ids])


def _ms(start: datetime, end: datetime) -> int:
    return max(0, round((end - start).total_seconds() * 1000))


def rowcount(result: Any) -> int:
    """Rows that a statement matched."""
    assert isinstance(result, CursorResult)
    return result.rowcount
