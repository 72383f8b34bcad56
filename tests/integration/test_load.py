"""What many sessions cost: counted in statements and in rows that Postgres touches, which no busy machine changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, event, select, text, update

from polar import lanes, lifecycle, placement, queries
from polar.api import wire
from polar.db import transaction
from polar.lifecycle import ENDED, Stage, State
from polar.models import RolloutSession, SessionEvent
from polar.statements import PLACE
from tests.fakes.tasks import task, topology

MANY = 3_000


@pytest.fixture
def lane(database: Engine) -> str:
    """A lane that has said that it is here."""
    node, spec = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, spec)
    return spec.name


@contextmanager
def statements(database: Engine) -> Iterator[list[str]]:
    """What is sent to Postgres while inside; one for each set of values that is sent with it."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, said: str, values: object, _context: object, many: bool) -> None:
        sent.extend([said] * (len(values) if many and isinstance(values, list) else 1))

    event.listen(database, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(database, "before_cursor_execute", note)


def cost(database: Engine, action: Callable[[], object]) -> int:
    with statements(database) as sent:
        action()
    return len(sent)


def submit(database: Engine, name: str, sessions: int) -> None:
    with transaction(database) as db:
        lifecycle.submit(db, task(task_id=name, num_samples=sessions))


def cancel(database: Engine, name: str) -> None:
    with transaction(database) as db:
        lifecycle.cancel_task(db, name)


def test_submit_and_cancel_take_as_many_statements_for_many_sessions_as_for_two(database: Engine) -> None:
    """However many sessions a task has, opening and cancelling them is work for Postgres, not for the API."""
    assert cost(database, lambda: submit(database, "few", 2)) == cost(database, lambda: submit(database, "many", MANY))
    assert cost(database, lambda: cancel(database, "few")) == cost(database, lambda: cancel(database, "many"))
    with transaction(database) as db:
        many = queries.sessions_of(db, queries.task(db, "many").id)
        assert [session.number for session in many] == list(range(MANY))
        assert {(session.state, session.error["code"]) for session in many if session.error} == {
            ("cancelled", "cancelled")
        }
        moves = db.execute(select(SessionEvent.move, SessionEvent.state).where(SessionEvent.session_id == many[7].id))
        assert moves.all() == [("open", "queued"), ("cancel", "cancelled")]


def test_a_poll_reads_no_session_that_has_not_ended(database: Engine) -> None:
    """A trainer that asks how its task does costs what has ended, not what waits."""
    submit(database, "waits", MANY)
    with transaction(database) as db:
        told = wire.load_task_status(db, queries.task(db, "waits"))
        assert (told["total_sessions"], told["completed_sessions"], told["results"]) == (MANY, 0, [])
        assert not [each for each in db.identity_map.values() if isinstance(each, RolloutSession)]


def test_a_cancelled_session_that_ran_keeps_how_long_and_by_whom(database: Engine, lane: str) -> None:
    """Cancelled with its task, a running session ends as it would alone: with its stage, its worker and its time."""
    submit(database, "mixed", 2)
    with transaction(database) as db:
        first, second = placement.place(db, lane)
    with transaction(database) as db:
        lifecycle.claim(db, first, Stage.PREWARM, "worker-1")
    cancel(database, "mixed")
    with transaction(database) as db:
        ran, waited = queries.session(db, first), queries.session(db, second)
        assert {ran.state, waited.state} == {State.CANCELLED} <= ENDED
        assert ran.timing["prewarm"]["run_ms"] >= 0 and "queued_ms" in ran.timing["prewarm"]
        assert (waited.timing, ran.lease_until, ran.worker) == ({}, None, None)
        assert [each.worker for each in queries.events_of(db, first)][-1] == "worker-1"


def test_a_beat_is_one_statement_for_all_that_is_held(database: Engine, lane: str) -> None:
    """A worker renews its leases at once, and learns which ones it lost."""
    submit(database, "held", 3)
    with transaction(database) as db:
        ids = placement.place(db, lane)
    with transaction(database) as db:
        for session_id in ids:
            lifecycle.claim(db, session_id, Stage.PREWARM, "worker-1")
    held = [(session_id, 1) for session_id in ids]

    def renew() -> None:
        with transaction(database) as db:
            assert lifecycle.renew(db, [*held[1:], (ids[0], 2), ("ses-none", 1)]) == set(ids[1:])

    assert cost(database, renew) == 1


@pytest.mark.parametrize(("tasks", "busy"), [(1, False), (10, True), (300, False), (300, True)])
def test_placing_touches_few_rows_however_many_wait(database: Engine, lane: str, tasks: int, busy: bool) -> None:
    """A lane with room for one looks at the first sessions of the first tasks, not at all of them."""
    for number in range(tasks):
        submit(database, f"waiting-{number}", MANY // tasks)
    with transaction(database) as db:
        if busy:  # every task has one that another lane runs
            db.execute(update(RolloutSession).where(RolloutSession.number == 0).values(lane="other"))
        db.execute(text("ANALYZE sessions, tasks"))
        values = {"stage": "prewarm", "state": "queued", "lane": lane, "room": 1, "looked_at": 1 + placement.SPARE}
        plan = db.execute(text(f"EXPLAIN (ANALYZE, FORMAT JSON) {PLACE.text}"), values).scalar_one()
    assert 0 < _rows(plan[0]["Plan"]) < MANY / 2


def _rows(node: dict[str, object]) -> float:
    """Rows that the scans of a plan read, kept and thrown away."""
    own = 0.0
    if "Relation Name" in node:
        read = float(str(node["Actual Rows"])) + float(str(node.get("Rows Removed by Filter", 0)))
        own = read * float(str(node["Actual Loops"]))
    parts = node.get("Plans", [])
    assert isinstance(parts, list)
    return own + sum(_rows(part) for part in parts)


def test_lanes_that_place_at_once_share_what_waits(database: Engine, lane: str) -> None:
    """A lane that looks while another has the first sessions locked takes the next ones, and none twice."""
    submit(database, "shared", 20)
    node, spec = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, spec.model_copy(update={"name": "gpu1"}))
    with transaction(database) as one, transaction(database) as other:
        first, second = placement.place(one, lane), placement.place(other, "gpu1")
        assert len(first) == len(second) == 3
    with transaction(database) as db:
        placed = db.scalars(select(RolloutSession.id).where(RolloutSession.lane.is_not(None))).all()
    assert sorted(placed) == sorted(first + second) and len(set(placed)) == 6
