"""Lists and figures for the pages: a page at a time, along an index, however many rows there are.

A list goes on from the last row that was shown (keyset), never from a number of rows to be counted and thrown away.
How many rows a table has is estimated. Reads light columns only; changes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
from sqlalchemy import ColumnElement, DateTime, Row, Select, Uuid, case, collate, func, select, text, tuple_
from sqlalchemy.orm import Session

from polar.lifecycle import ENDED, State
from polar.models import RolloutSession, SessionEvent, Task, TraceRow

ROWS = 50
"""Of one page."""
ENDED_STATES = tuple(sorted(ENDED))
NAME = collate(Task.task_id, "C")
ORDERS: dict[str, tuple[Any, bool]] = {
    "newest": (Task.created_at, True),
    "oldest": (Task.created_at, False),
    "name": (NAME, False),
}
"""How tasks may be ordered: by what, and whether downwards."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One page of a list."""

    rows: Sequence[Row[Any]]
    before: str | None = None
    """Cursor of the page before; None if this is the first."""
    after: str | None = None
    """Cursor of the page after; None if this is the last."""


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks are listed; what is empty does not filter."""

    state: str = ""
    harness: str = ""
    evaluator: str = ""
    group: str = ""
    name: str = ""
    """Part of the task's name."""
    since: datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """As SQL, each along an index."""
        found: list[ColumnElement[bool]] = []
        if self.state:
            found.append(Task.state == self.state)
        if self.harness:
            found.append(HARNESS.in_([self.harness]))
        if self.evaluator:
            found.append(EVALUATOR.in_([self.evaluator]))
        if self.group:
            found.append(Task.group_id == self.group)
        if self.name:
            found.append(NAME.ilike(f"%{_literally(self.name)}%", escape="\\"))
        if self.since is not None:
            found.append(Task.created_at >= self.since)
        return found


HARNESS = Task.spec["agent"]["harness"].astext
EVALUATOR = Task.spec["evaluator"]["strategy"].astext
TASK_COLUMNS = (
    Task.id,
    Task.task_id,
    Task.current,
    Task.state,
    Task.num_samples,
    Task.priority,
    Task.group_id,
    Task.error,
    Task.created_at,
    Task.ended_at,
    HARNESS.label("harness"),
    Task.spec["agent"]["import_path"].astext.label("import_path"),
    EVALUATOR.label("evaluator"),
)
SESSION_COLUMNS = (
    RolloutSession.id,
    RolloutSession.task_pk,
    RolloutSession.number,
    RolloutSession.stage,
    RolloutSession.state,
    RolloutSession.attempt,
    RolloutSession.lane,
    RolloutSession.node_id,
    RolloutSession.reward,
    RolloutSession.turns,
    RolloutSession.sampled_tokens,
    RolloutSession.timing,
    RolloutSession.error,
    RolloutSession.created_at,
    RolloutSession.claimed_at,
    RolloutSession.ended_at,
)


def tasks(db: Session, wanted: TaskFilter, order: str = "newest", cursor: str = "", limit: int = ROWS) -> Rows:
    """Tasks that match, in this order, from the cursor on."""
    key, down = ORDERS[order]
    query = select(*TASK_COLUMNS, key.label("key")).where(*wanted.conditions())
    return _page(db, query, (key, Task.id), down, cursor, limit)


def sessions(
    db: Session,
    *,
    state: str = "",
    stage: str = "",
    lane: str = "",
    blame: str = "",
    cursor: str = "",
    limit: int = ROWS,
) -> Rows:
    """Sessions that match, newest first; those of one end are in the order in which they ended."""
    key = RolloutSession.ended_at if state in ENDED else RolloutSession.created_at
    query = select(*SESSION_COLUMNS, Task.task_id, key.label("key")).join(Task, Task.id == RolloutSession.task_pk)
    if state:
        query = query.where(RolloutSession.state == state)
        if state in ENDED:
            query = query.where(RolloutSession.ended_at.is_not(None))
        else:
            query = query.where(RolloutSession.ended_at.is_(None))
    for column, value in ((RolloutSession.stage, stage), (RolloutSession.lane, lane)):
        if value:
            query = query.where(column == value)
    if blame:
        query = query.where(RolloutSession.error["blame"].astext == blame)
    return _page(db, query, (key, RolloutSession.id), True, cursor, limit)


def sessions_of(db: Session, task_pk: uuid.UUID, after: int = -1, limit: int = ROWS) -> Sequence[Row[Any]]:
    """A task's sessions by number, after this one."""
    query = select(*SESSION_COLUMNS).where(RolloutSession.task_pk == task_pk, RolloutSession.number > after)
    return db.execute(query.order_by(RolloutSession.number).limit(limit)).all()


def counts_of(db: Session, task_pks: Sequence[uuid.UUID]) -> dict[uuid.UUID, dict[str, Any]]:
    """Of each task: how many sessions are in each state, and their mean reward."""
    rows = db.execute(
        select(
            RolloutSession.task_pk,
            RolloutSession.state,
            func.count(),
            func.sum(RolloutSession.reward),
            func.count(RolloutSession.reward),
        )
        .where(RolloutSession.task_pk.in_(task_pks))
        .group_by(RolloutSession.task_pk, RolloutSession.state)
    )
    found: dict[uuid.UUID, dict[str, Any]] = {pk: {"states": {}, "sum": 0.0, "rewarded": 0} for pk in task_pks}
    for pk, state, count, total, rewarded in rows:
        found[pk]["states"][state] = count
        found[pk]["sum"] += total or 0.0
        found[pk]["rewarded"] += rewarded
    for each in found.values():
        each["reward"] = each["sum"] / each["rewarded"] if each["rewarded"] else None
    return found


def group_figures(db: Session, task_pk: uuid.UUID) -> dict[str, Any]:
    """What trainers ask of a group: spread of its rewards, tokens, turns, and time."""
    session = RolloutSession
    spent = func.extract("epoch", session.ended_at - session.created_at)
    row = db.execute(
        select(
            func.count().label("sessions"),
            func.count(session.ended_at).label("ended"),
            func.count(case((session.state == State.COMPLETED, 1))).label("completed"),
            func.count(session.reward).label("rewarded"),
            func.avg(session.reward).label("mean"),
            func.stddev_samp(session.reward).label("deviation"),
            func.min(session.reward).label("least"),
            func.max(session.reward).label("most"),
            func.avg(session.turns).label("turns"),
            func.sum(session.sampled_tokens).label("tokens"),
            func.percentile_cont(0.5).within_group(spent).label("median_seconds"),
        ).where(session.task_pk == task_pk)
    ).one()
    return dict(row._mapping)


def reward_counts(db: Session, task_pk: uuid.UUID, low: float, high: float, bins: int) -> list[int]:
    """How many rewards fall into each of equal bins from `low` to `high`; the highest reward is in the last."""
    place = func.width_bucket(RolloutSession.reward, low, high, bins)
    rows = db.execute(
        select(place, func.count())
        .where(RolloutSession.task_pk == task_pk, RolloutSession.reward.is_not(None))
        .group_by(place)
    )
    counts = [0] * bins
    for bucket, count in rows:
        counts[min(max(int(bucket) - 1, 0), bins - 1)] += count
    return counts


def traces_of(db: Session, ids: Sequence[str]) -> dict[str, list[Row[Any]]]:
    """The traces of these sessions without their tokens."""
    rows = db.execute(
        select(
            TraceRow.session_id,
            TraceRow.number,
            TraceRow.fidelity,
            TraceRow.trainable,
            TraceRow.reward,
            TraceRow.weight,
            TraceRow.certificate,
            (func.length(TraceRow.prompt_ids) // 4).label("prompt_tokens"),
            (func.length(TraceRow.response_ids) // 4).label("response_tokens"),
        )
        .where(TraceRow.session_id.in_(ids))
        .order_by(TraceRow.session_id, TraceRow.number)
    )
    found: dict[str, list[Row[Any]]] = {}
    for row in rows:
        found.setdefault(row.session_id, []).append(row)
    return found


def fidelity_counts(db: Session, task_pk: uuid.UUID) -> list[Row[Any]]:
    """A task's traces by fidelity and by whether they may train."""
    return list(
        db.execute(
            select(TraceRow.fidelity, TraceRow.trainable, func.count().label("count"))
            .join(RolloutSession, RolloutSession.id == TraceRow.session_id)
            .where(RolloutSession.task_pk == task_pk)
            .group_by(TraceRow.fidelity, TraceRow.trainable)
            .order_by(TraceRow.fidelity, TraceRow.trainable.desc())
        )
    )


@dataclass(slots=True)
class Bucket:
    """What ended in a piece of time."""

    at: datetime
    states: dict[str, int] = field(default_factory=dict)
    rewarded: int = 0
    reward_sum: float = 0.0
    tokens: int = 0

    @property
    def reward(self) -> float | None:
        """The mean; None if nothing was rewarded."""
        return self.reward_sum / self.rewarded if self.rewarded else None


def ended_over_time(db: Session, since: datetime, until: datetime, buckets: int) -> list[Bucket]:
    """Sessions that ended in each of equal pieces of time, from an index alone."""
    width = (until - since).total_seconds() / buckets
    session = RolloutSession
    place = func.floor(func.extract("epoch", session.ended_at - since) / width).label("place")
    rows = db.execute(
        select(
            place,
            session.state,
            func.count(),
            func.count(session.reward),
            func.coalesce(func.sum(session.reward), 0.0),
            func.coalesce(func.sum(session.sampled_tokens), 0),
        )
        .where(session.state.in_(ENDED_STATES), session.ended_at >= since, session.ended_at < until)
        .group_by(place, session.state)
    )
    start = since.timestamp()
    found = [Bucket(datetime.fromtimestamp(start + number * width, UTC)) for number in range(buckets)]
    for number, state, count, rewarded, total, tokens in rows:
        bucket = found[min(int(number), buckets - 1)]
        bucket.states[state] = bucket.states.get(state, 0) + count
        bucket.rewarded += rewarded
        bucket.reward_sum += total
        bucket.tokens += int(tokens)
    return found


def lane_loads(db: Session) -> dict[str | None, dict[tuple[str, str], int]]:
    """Open sessions of each lane by (stage, state); of no lane yet under None."""
    session = RolloutSession
    rows = db.execute(
        select(session.lane, session.stage, session.state, func.count())
        .where(session.ended_at.is_(None))
        .group_by(session.lane, session.stage, session.state)
    )
    found: dict[str | None, dict[tuple[str, str], int]] = {}
    for lane, stage, state, count in rows:
        found.setdefault(lane, {})[stage, state] = count
    return found


def estimated(db: Session, *tables: str) -> dict[str, int]:
    """About how many rows these tables have, as Postgres counted them last."""
    rows = db.execute(
        text(
            "SELECT relname, greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = ANY(CAST(:names AS regclass[]))"
        ),
        {"names": list(tables)},
    )
    return {str(name): int(count) for name, count in rows}


def events_of(db: Session, session_id: str, limit: int = 500) -> Sequence[SessionEvent]:
    """A session's moves in order; of very many the last."""
    newest = select(SessionEvent).where(SessionEvent.session_id == session_id).order_by(SessionEvent.id.desc())
    return db.scalars(newest.limit(limit)).all()[::-1]


# ── inside ─────────────────────────────────────────────────────────────────────────────────────────


def _page(db: Session, query: Select[Any], keys: tuple[Any, Any], down: bool, cursor: str, limit: int) -> Rows:
    """The page that a cursor names: `>` goes on after a row, `<` ends before it."""
    backwards, place = cursor.startswith("<"), _place(cursor, keys)
    falling = down != backwards
    if place is not None:
        row, here = tuple_(*keys), tuple_(*place)
        query = query.where(row < here if falling else row > here)
    ordered = query.order_by(*(key.desc() if falling else key.asc() for key in keys)).limit(limit + 1)
    found = list(db.execute(ordered))
    more, found = len(found) > limit, found[:limit]
    if backwards:
        found.reverse()
    if not found:
        return Rows([])
    first, last = _cursor("<", found[0]), _cursor(">", found[-1])
    if backwards:
        return Rows(found, before=first if more else None, after=last)
    return Rows(found, before=first if place is not None else None, after=last if more else None)


def _cursor(sign: str, row: Row[Any]) -> str:
    return sign + orjson.dumps([row.key, row.id]).decode()


def _place(cursor: str, keys: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """The values of a cursor; None if there is none, or if it is none of this list: then the list begins anew."""
    try:
        values = orjson.loads(cursor[1:])
        first, second = (_read(value, key) for value, key in zip(values, keys, strict=True))
    except (ValueError, TypeError):
        return None
    return first, second


def _read(value: Any, key: Any) -> Any:
    """A cursor's value as its column has it. Raises ValueError or TypeError."""
    if isinstance(key.type, DateTime):
        moment = datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return uuid.UUID(value) if isinstance(key.type, Uuid) else str(value)


def _literally(part: str) -> str:
    """A text in which LIKE finds no wildcards."""
    return part.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
