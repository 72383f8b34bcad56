"""The order in which lanes take sessions, held against the same rule in plain Python: priority, share, age."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from polar import lanes, lifecycle, placement, queries
from polar.db import transaction
from polar.errors import LostLeaseError
from polar.lifecycle import BEFORE_RECONSTRUCT, Stage, State
from polar.models import Lane, RolloutSession, SessionEvent, Task, TraceRow
from polar.topology import EngineSpec, LaneSpec, NodeSpec
from tests.fakes.tasks import task

pytestmark = pytest.mark.integration
LANES = ("a", "b", "c")


@dataclass(frozen=True)
class Waiting:
    """A session that nobody has, and what decides when it is taken."""

    priority: int
    share: int
    """What its task would have with it."""
    queued_at: datetime
    id: str

    def key(self) -> tuple[int, int, datetime]:
        """The less, the sooner."""
        return -self.priority, self.share, self.queued_at


def by_rule(db: Session, lane: str) -> list[str]:
    """What this lane is to take now, best first: the rule as it is told, over every row there is."""
    spec = db.scalars(select(Lane).where(Lane.name == lane)).one()
    columns = ("id", "task_pk", "lane", "stage", "state", "priority", "queued_at", "ended_at")
    rows = db.execute(select(*(getattr(RolloutSession, name) for name in columns)).order_by(RolloutSession.number))
    lanes_of = dict(db.execute(select(Task.id, Task.spec["lanes"])).all())
    unended = [row for row in rows if row.ended_at is None]
    room = spec.max_execute + spec.ready_buffer
    room -= sum(row.lane == lane and row.stage in BEFORE_RECONSTRUCT for row in unended)
    share = Counter(row.task_pk for row in unended if row.lane is not None)
    found = []
    for row in unended:
        allowed = lanes_of[row.task_pk]
        if row.lane is None and row.state == State.QUEUED and (allowed is None or lane in allowed):
            share[row.task_pk] += 1
            found.append(Waiting(row.priority, share[row.task_pk], row.queued_at, row.id))
    return [each.id for each in sorted(found, key=Waiting.key)[: max(0, room)]]


def open_lanes(database: Engine, room: Sequence[int]) -> None:
    """Lanes a, b, c, … with so much room."""
    for name, most in zip(LANES, room, strict=False):
        spec = LaneSpec(name=name, engine=EngineSpec(base_url="http://127.0.0.1:1"), max_execute=most, ready_buffer=0)
        with transaction(database) as db:
            lanes.beat(db, NodeSpec(id=f"node-{name}", lanes=(spec,)), spec)


def submit(database: Engine, name: str, **changes: Any) -> None:
    with transaction(database) as db:
        lifecycle.submit(db, task(task_id=name, **changes))


def taken(database: Engine, *, stages: Sequence[Stage] = tuple(Stage)) -> list[str]:
    """What the lanes have, in order."""
    query = select(RolloutSession.id).where(
        RolloutSession.ended_at.is_(None), RolloutSession.lane.is_not(None), RolloutSession.stage.in_(stages)
    )
    with transaction(database) as db:
        return sorted(db.scalars(query))


def place(database: Engine, lane: str) -> list[str]:
    with transaction(database) as db:
        return placement.place(db, lane)


def step(database: Engine, session_id: str, *, usable: bool = False) -> None:
    """One stage further; to the end, with a trace that may train, if it is to be usable."""
    while True:
        with transaction(database) as db:
            session = queries.session(db, session_id)
            claimed = lifecycle.claim(db, session_id, Stage(session.stage), "w")
            if claimed is None:  # no room to execute
                return
            if usable and claimed.stage == Stage.EVALUATE:
                arrays = dict.fromkeys(("prompt_ids", "response_ids", "loss_mask", "body"), b"")
                db.add(TraceRow(session_id=session_id, number=0, fidelity="exact", trainable=True, **arrays))
                db.flush()
            lifecycle.advance(db, claimed)
            done = claimed.stage == Stage.EVALUATE and claimed.state != State.QUEUED
        if done or not usable:
            return


def end(database: Engine, session_id: str) -> None:
    with transaction(database) as db:
        lifecycle.time_out(db, queries.session(db, session_id))


TASKS = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 4),
        "dispatch_priority": st.integers(0, 2),
        "lanes": st.sampled_from([None, None, ["a"], ["a", "b"], ["c"]]),
        "early_stop_min_usable_sessions": st.sampled_from([None, None, 1]),
    }
)
MOVES = st.one_of(
    st.tuples(st.just("place"), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(0, 9)),
    st.tuples(st.just("usable"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("submit"), TASKS),
)


def move(database: Engine, what: str, which: Any, names: list[str]) -> None:
    """Whatever else happens between two looks for work."""
    if what == "submit":
        names.append(f"t{len(names)}")
        submit(database, names[-1], **{**which, "early_stop_min_usable_sessions": None})
    elif what == "cancel":
        with transaction(database) as db:
            lifecycle.cancel_task(db, names[which % len(names)])
    elif found := taken(database, stages=tuple(Stage) if what == "end" else (Stage.PREWARM, Stage.EXECUTE)):
        session_id = found[which % len(found)]
        if what == "end":
            end(database, session_id)
        else:
            step(database, session_id, usable=what == "usable")


@pytest.mark.parametrize("spare", [0, 3])
def test_any_history_is_placed_by_the_rule(database: Engine, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Whatever was placed, moved on, ended, cancelled or stopped early before: what is taken is what the rule says.

    With so few rows looked at beyond the room there is, the statement's limits matter in these small cases, too."""
    monkeypatch.setattr(placement, "SPARE", spare)
    with database.begin() as connection:  # thousands of small transactions, and no power cut to come
        connection.execute(text(f'ALTER DATABASE "{database.url.database}" SET synchronous_commit TO off'))
    database.dispose()

    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        room=st.lists(st.integers(1, 3), min_size=3, max_size=3),
        tasks=st.lists(TASKS, min_size=1, max_size=7),
        moves=st.lists(MOVES, max_size=12),
    )
    def holds(room: list[int], tasks: list[dict[str, Any]], moves: list[tuple[str, Any]]) -> None:
        with database.begin() as connection:
            for table in ("tasks", "nodes"):  # and with them all that is theirs
                connection.execute(text(f"DELETE FROM {table}"))
        open_lanes(database, room)
        names = [f"t{n}" for n in range(len(tasks))]
        for name, changes in zip(names, tasks, strict=True):
            fits = changes["num_samples"] >= (changes["early_stop_min_usable_sessions"] or 0)
            submit(database, name, **(changes if fits else {**changes, "early_stop_min_usable_sessions": None}))
        for what, which in [*moves, *(("place", n) for n in range(3))]:
            if what != "place":
                move(database, what, which, names)
                continue
            with transaction(database) as db:
                expected = by_rule(db, LANES[which])
            assert place(database, LANES[which]) == expected

    holds()


def test_hundreds_of_tasks_are_placed_by_the_rule(database: Engine) -> None:
    """The same at scale: 300 tasks of all sizes and priorities, a third of them for some lanes only."""
    chance = random.Random(5)
    open_lanes(database, (5, 2, 9))
    for n in range(300):
        allowed = chance.choice([None, None, ["a"], ["b", "c"]])
        samples, priority = chance.choice([1, 2, 3, 8]), chance.choice([0, 0, 0, 1, 9])
        submit(database, f"t{n}", num_samples=samples, dispatch_priority=priority, lanes=allowed)
    placed: Counter[str] = Counter()
    for turn in range(24):
        lane = LANES[turn % 3]
        with transaction(database) as db:
            expected = by_rule(db, lane)
        assert place(database, lane) == expected
        placed[lane] += len(expected)
        for session_id in chance.sample(found := taken(database), len(found) // 3):
            if chance.random() < 0.5:
                end(database, session_id)
            else:
                step(database, session_id)
        if turn % 5 == 0:
            with transaction(database) as db:
                lifecycle.cancel_task(db, f"t{chance.randrange(300)}")
    assert min(placed.values()) > 5


def test_lanes_that_race_take_each_session_once_and_in_order(database: Engine) -> None:
    """Three lanes pull at the same time until nothing waits, while tasks are cancelled: none is taken twice, none by a
    lane that its task does not allow, none past a lane's room, and nobody overtakes a higher priority by more than
    what the others had in their hands."""
    chance = random.Random(7)
    room = (4, 2, 3)
    open_lanes(database, room)
    for n in range(120):
        allowed = chance.choice([None, None, ["a", "c"], ["b"]])
        submit(database, f"t{n}", num_samples=chance.choice([1, 2, 5]), dispatch_priority=n % 3, lanes=allowed)
    most: Counter[str] = Counter()
    broken: list[BaseException] = []
    held = select(func.count()).where(RolloutSession.ended_at.is_(None))

    def pull(lane: str) -> None:
        mine: list[str] = []
        try:
            while True:
                with transaction(database) as db:
                    mine += placement.place(db, lane)
                    most[lane] = max(most[lane], db.scalar(held.where(RolloutSession.lane == lane)) or 0)
                if not mine:
                    return
                with suppress(LostLeaseError), transaction(database) as db:  # cancelled in between
                    session = queries.session(db, mine.pop(0))
                    if session.state == State.QUEUED:
                        lifecycle.time_out(db, session)
        except BaseException as error:
            broken.append(error)
            raise

    def cancel() -> None:
        for n in random.Random(8).sample(range(120), 25):
            with transaction(database) as db:
                lifecycle.cancel_task(db, f"t{n}")

    threads = [threading.Thread(target=pull, args=(lane,)) for lane in LANES] + [threading.Thread(target=cancel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not broken
    with transaction(database) as db:
        rows = {row.id: row for row in db.scalars(select(RolloutSession))}
        allowed = {row.id: row.spec["lanes"] for row in db.scalars(select(Task))}
        events = db.scalars(select(SessionEvent).where(SessionEvent.move == "place").order_by(SessionEvent.id)).all()
    assert all(row.ended_at is not None for row in rows.values())
    order = [event.session_id for event in events]
    assert len(order) == len(set(order)) > 150
    assert all(most[lane] <= n for lane, n in zip(LANES, room, strict=True)), most
    for event in events:
        mine = allowed[rows[event.session_id].task_pk]
        assert mine is None or event.note["lane"] in mine
    late: Counter[int] = Counter()
    for n, event in enumerate(events):
        for other in events[n + 1 :]:
            mine = allowed[rows[other.session_id].task_pk]
            if mine is None or event.note["lane"] in mine:
                late[n] += rows[other.session_id].priority > rows[event.session_id].priority
    assert max(late.values()) <= sum(room), late.most_common(3)
