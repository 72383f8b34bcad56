"""Whether a submit is taken: how much a key may have open, and the answer to a submit that is sent again.

Both look first and write later, so submits of one key pass one at a time: the lock is held until the commit, and the
next one counts what this one added. Callers without a key, where the API asks for none, count as one.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, func, select, text
from sqlalchemy.orm import Session

from polar.errors import ConflictError, LimitError, NotFoundError, SpecError
from polar.lifecycle import TaskState, cancel_task
from polar.models import Policy, RolloutSession, Task, now
from polar.policy import number
from polar.spec import TaskRequest

LOCK_CLASS = 7_362
NAME_LOCK_CLASS = 7_363
LONGEST_IDEMPOTENCY_KEY = 255
BURIED_SECONDS = 300.0
"""How long a cancel that came before its task is remembered."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one key may have open at once; 0 means any number."""

    tasks: int = 0
    sessions: int = 0


def admit(
    db: Session,
    request: TaskRequest,
    allowance: Allowance,
    key_id: uuid.UUID | None = None,
    idempotency_key: str | None = None,
) -> Task | None:
    """The task that this very submit made before, or None: then it may be made now, in this transaction.

    Raises LimitError when the key has too much open, SpecError for what waiting would not help, and ConflictError for
    a task that was cancelled before it came."""
    _refuse_buried(db, request.task_id)
    if idempotency_key is None and not allowance.tasks and not allowance.sessions:
        return None
    _one_at_a_time(db, LOCK_CLASS, str(key_id or ""))
    if idempotency_key is not None and (before := _made_before(db, request, key_id, idempotency_key)) is not None:
        return before
    _check_tasks(db, allowance.tasks, key_id)
    _check_sessions(db, allowance.sessions, key_id, request.num_samples)
    return None


def check_age(db: Session, request: TaskRequest) -> None:
    """A task that says which version it was made for is not begun when its tokens could not train any more.

    Raises SpecError."""
    row = db.get(Policy, 1)
    bound = request.max_staleness
    if bound is None and row is not None:
        bound = row.max_staleness
    made, latest = number(request.metadata.get("policy_version")), number(row.version if row is not None else None)
    if bound is None or made is None or latest is None or latest - made <= bound:
        return
    said = f"{made} is {latest - made} versions behind the policy, {latest}, and max_staleness is {bound}"
    raise SpecError.at("metadata.policy_version", f"{said}: nothing of it could train; submit it for {latest}")


def cancel_early(db: Session, task_id: str) -> Task:
    """Cancel a task that may not have come yet: then a submit of that name is refused for BURIED_SECONDS.

    Kept as a task without sessions."""
    _one_at_a_time(db, NAME_LOCK_CLASS, task_id)
    try:
        return cancel_task(db, task_id)
    except NotFoundError:
        moment = now()
        values = {"task_id": task_id, "spec": {"agent": {}}, "num_samples": 0, "state": TaskState.CANCELLED}
        row = Task(**values, created_at=moment, updated_at=moment, ended_at=moment)
        db.add(row)
        return row


def _one_at_a_time(db: Session, kind: int, name: str) -> None:
    db.execute(text("SELECT pg_advisory_xact_lock(:kind, hashtext(:name))"), {"kind": kind, "name": name})


def _refuse_buried(db: Session, task_id: str) -> None:
    _one_at_a_time(db, NAME_LOCK_CLASS, task_id)  # a cancel of this name comes before this submit or after it
    since = now() - timedelta(seconds=BURIED_SECONDS)
    buried = select(Task.id).where(
        Task.task_id == task_id, Task.current, Task.num_samples == 0, Task.created_at > since
    )
    if db.scalar(buried) is not None:
        said = f"task_id {task_id!r} was cancelled before it was submitted; take another name"
        raise ConflictError(said, code="task_cancelled")


def _made_before(db: Session, request: TaskRequest, key_id: uuid.UUID | None, idempotency_key: str) -> Task | None:
    if not 1 <= len(idempotency_key) <= LONGEST_IDEMPOTENCY_KEY:
        raise SpecError.at("Idempotency-Key", f"must have 1 to {LONGEST_IDEMPOTENCY_KEY} characters")
    found = db.scalar(
        select(Task)
        .where(Task.idempotency_key == idempotency_key, Task.key_id == key_id)
        .order_by(Task.created_at.desc())
        .limit(1)
    )
    # Compared as requests, not as bytes: a field that a newer Polar adds has its default in both.
    if found is not None and TaskRequest.model_validate(found.spec) != request:
        reason = f"was sent before with another body, for task {found.task_id!r}; take a new one for a new task"
        raise SpecError(
            f"Idempotency-Key: {reason}", errors=[("Idempotency-Key", reason)], code="idempotency_key_reused"
        )
    return found


def _check_tasks(db: Session, limit: int, key_id: uuid.UUID | None) -> None:
    if not limit:
        return
    count = db.scalar(select(func.count()).select_from(Task).where(*_open_of(key_id))) or 0
    if count >= limit:
        raise LimitError(
            f"this API key has {count} tasks running, and may have {limit}; wait until some have ended",
            code="too_many_open_tasks",
            detail={"limit": limit, "open": count, "asked": 1},
        )


def _check_sessions(db: Session, limit: int, key_id: uuid.UUID | None, asked: int) -> None:
    if not limit:
        return
    if asked > limit:
        raise SpecError.at("num_samples", f"{asked} are more than one API key may have open, {limit}")
    query = select(func.count()).select_from(RolloutSession).join(Task)
    count = db.scalar(query.where(*_open_of(key_id), RolloutSession.ended_at.is_(None))) or 0
    if count + asked > limit:
        raise LimitError(
            f"this API key has {count} sessions open, and may have {limit}: {asked} more do not fit; "
            "wait until some have ended",
            code="too_many_open_sessions",
            detail={"limit": limit, "open": count, "asked": asked},
        )


def _open_of(key_id: uuid.UUID | None) -> tuple[ColumnElement[bool], ...]:
    # `== None` becomes IS NULL; IS NOT DISTINCT FROM would say the same and use no index.
    return (Task.ended_at.is_(None), Task.key_id == key_id)
