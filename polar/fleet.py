"""The figures of all nodes together, read from Postgres in one snapshot. How they are shown is the API's affair.

Cheap however old the database is: open sessions, open tasks and owed callbacks have indexes of their own, and of the
ended sessions only those are read that a process has not counted yet, along the numbers that the feed gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from polar.lifecycle import LANE_ALIVE_SECONDS, State
from polar.models import Consumer, Delivery, Feed, Lane, Node, Policy, RolloutSession, Task, now
from polar.policy import GateMode

Sample = tuple[str, tuple[str, ...], float]
"""A figure's name, the values of its labels in order, and the figure."""


class Fleet:
    """Reads the figures, and remembers what of the ended sessions it has counted."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._counted = 0
        """The feed's number up to which `_ended`, `_turns` and `_tokens` go."""
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._turns = 0
        self._tokens = 0
        self._shown: dict[tuple[str, tuple[str, ...]], float] = {}

    def samples(self) -> list[Sample]:
        """Every figure, as of one moment. Not for two threads at once."""
        # One snapshot: a session that ends meanwhile is counted once, as open or as ended.
        snapshot = self._database.execution_options(isolation_level="REPEATABLE READ")
        with snapshot.connect() as connection, Session(connection) as db:
            moment = now()
            return [*_open(db, moment), *self._totals(db), *_machines(db, moment), *_owed(db, moment)]

    def _totals(self, db: Session) -> Iterator[Sample]:
        last = db.scalar(select(Feed.last)) or 0
        ended = RolloutSession.feed_number
        for state, stage, blame, count, turns, tokens in _sums(db, ended > self._counted, ended <= last):
            self._ended[state, stage, blame] += count
            self._turns += turns
            self._tokens += tokens
        self._counted = max(self._counted, last)
        numberless = _sums(db, RolloutSession.ended_at.is_not(None), ended.is_(None))
        still_open = _sums(db, RolloutSession.ended_at.is_(None))
        counts = self._ended.copy()
        for state, stage, blame, count, _, _ in numberless:
            counts[state, stage, blame] += count
        for labels, count in counts.items():
            yield self._counter("polar_sessions_ended_total", labels, count)
        rows = [*numberless, *still_open]
        yield self._counter("polar_completions_total", (), self._turns + sum(row[4] for row in rows))
        yield self._counter("polar_sampled_tokens_total", (), self._tokens + sum(row[5] for row in rows))
        yield "polar_feed_last", (), last
        yield "polar_feed_unnumbered", (), sum(row[3] for row in numberless)
        for name, cursor in db.execute(select(Consumer.name, Consumer.cursor)):
            yield "polar_feed_lag", (name,), max(0, last - cursor)

    def _counter(self, name: str, labels: tuple[str, ...], value: float) -> Sample:
        """Never less than it was: deleting an open task must not look like a counter that began anew."""
        self._shown[name, labels] = value = max(value, self._shown.get((name, labels), 0))
        return name, labels, value


def _sums(db: Session, *which: object) -> list[tuple[str, str, str, int, int, int]]:
    blame = func.coalesce(RolloutSession.error["blame"].astext, "").label("blame")
    query = select(
        RolloutSession.state,
        RolloutSession.stage,
        blame,
        func.count(),
        func.coalesce(func.sum(RolloutSession.turns), 0),
        func.coalesce(func.sum(RolloutSession.sampled_tokens), 0),
    )
    rows = db.execute(query.where(*which).group_by(RolloutSession.state, RolloutSession.stage, blame))  # type: ignore[arg-type]
    return [(state, stage, whose, int(n), int(turns), int(tokens)) for state, stage, whose, n, turns, tokens in rows]


def _open(db: Session, moment: datetime) -> Iterator[Sample]:
    rows = db.execute(
        select(
            RolloutSession.stage,
            RolloutSession.state,
            func.coalesce(RolloutSession.lane, ""),
            func.count(),
            func.min(RolloutSession.queued_at),
        )
        .where(RolloutSession.ended_at.is_(None))
        .group_by(RolloutSession.stage, RolloutSession.state, RolloutSession.lane)
    )
    for stage, state, lane, count, oldest in rows:
        yield "polar_sessions", (stage, state, lane), count
        if state == State.QUEUED:
            yield "polar_queue_depth", (stage, lane), count
            yield "polar_queue_age_seconds", (stage, lane), _age(oldest, moment)
    tasks = select(func.count()).select_from(Task).where(Task.ended_at.is_(None))
    yield "polar_tasks_open", (), db.scalar(tasks) or 0


def _machines(db: Session, moment: datetime) -> Iterator[Sample]:
    after = moment - timedelta(seconds=LANE_ALIVE_SECONDS)
    for node, draining, beat in db.execute(select(Node.id, Node.draining, Node.heartbeat_at)):
        yield "polar_node_alive", (node,), beat > after
        yield "polar_node_draining", (node,), draining
    for node, lane, most, beat in db.execute(select(Lane.node_id, Lane.name, Lane.max_execute, Lane.heartbeat_at)):
        yield "polar_lane_alive", (node, lane), beat > after
        yield "polar_lane_max_execute", (node, lane), most
    yield "polar_gate_open", (), db.scalar(select(Policy.gate)) in (None, GateMode.OPEN)


def _owed(db: Session, moment: datetime) -> Iterator[Sample]:
    owed = select(func.count(), func.min(Delivery.created_at)).where(Delivery.ended_at.is_(None))
    count, oldest = db.execute(owed).one()
    yield "polar_deliveries_owed", (), count
    yield "polar_delivery_age_seconds", (), _age(oldest, moment)


def _age(since: datetime | None, moment: datetime) -> float:
    return max(0.0, (moment - since).total_seconds()) if since is not None else 0.0
