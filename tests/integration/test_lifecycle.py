"""The moves of a session on real Postgres: rows in a state, one move, what the rows say then."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import Engine, select, update

from polar import lanes, lifecycle, placement, queries
from polar.db import transaction
from polar.errors import ConflictError, EvaluatorError, LostLeaseError, NodeError
from polar.lifecycle import ENDED, OPEN, STAGES, Stage, State, TaskState
from polar.models import Delivery, RolloutSession, Task, TraceRow, now
from polar.sweep import sweep
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task, topology


@pytest.fixture
def lane(database: Engine) -> str:
    """A lane that has said that it is here."""
    node, spec = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, spec)
    return "gpu0"


def submit(database: Engine, **changes: object) -> list[str]:
    with transaction(database) as db:
        row = lifecycle.submit(db, task(**changes))
        return [each.id for each in queries.sessions_of(db, row.id)]


def place(database: Engine) -> list[str]:
    with transaction(database) as db:
        return placement.place(db, "gpu0")


def claim(database: Engine, session_id: str, stage: Stage = Stage.PREWARM) -> RolloutSession | None:
    with transaction(database) as db:
        session = lifecycle.claim(db, session_id, stage, "worker-1")
        if session is not None:
            _ = session.task
        return session


def advance(database: Engine, session: RolloutSession) -> Stage | None:
    with transaction(database) as db:
        return lifecycle.advance(db, db.merge(session, load=False))


def read(database: Engine, session_id: str) -> RolloutSession:
    with transaction(database) as db:
        return queries.session(db, session_id)


def to(database: Engine, session_id: str, stage: Stage) -> RolloutSession:
    """Move a placed session along until it runs in `stage`."""
    for each in STAGES:
        session = claim(database, session_id, each)
        assert session is not None
        if each is stage:
            return session
        advance(database, session)
    raise AssertionError


def test_a_session_walks_all_stages_and_its_events_tell_the_story(database: Engine, lane: str) -> None:
    """Each move leaves one event, and the last advance completes session and task."""
    (session_id,) = submit(database)
    assert [session_id] == place(database)
    for stage in STAGES:
        session = claim(database, session_id, stage)
        assert session is not None
        advance(database, session)
    ended = read(database, session_id)
    assert (ended.stage, ended.state) == (Stage.EVALUATE, State.COMPLETED)
    assert ended.ended_at is not None and ended.lease_until is None
    with transaction(database) as db:
        moves = [event.move for event in queries.events_of(db, session_id)]
        assert queries.task(db, "task-1").state == TaskState.COMPLETED
    assert ["open", "place", *["claim", "advance"] * 4] == moves
    assert {"queued_ms", "run_ms"} == set(ended.timing["execute"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_delivery_is_nothing(database: Engine, lane: str, stage: Stage) -> None:
    """A message for a session that somebody runs already claims nothing."""
    (session_id,) = submit(database)
    place(database)
    to(database, session_id, stage)
    assert claim(database, session_id, stage) is None


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("state", sorted(ENDED))
def test_nothing_moves_a_session_that_has_ended(database: Engine, lane: str, stage: Stage, state: State) -> None:
    """Ended is ended: no claim, no advance, no second end."""
    (session_id,) = submit(database)
    place(database)
    session = to(database, session_id, stage)
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(state=state, ended_at=now()))
    assert claim(database, session_id, stage) is None
    with pytest.raises(LostLeaseError):
        advance(database, session)
    with transaction(database) as db:
        assert not lifecycle.cancel(db, queries.session(db, session_id))
    assert state == read(database, session_id).state


def test_an_expired_lease_is_freed_and_the_old_holder_cannot_write(database: Engine, lane: str) -> None:
    """The sweeper queues the session again under a new attempt; whoever held the old one matches no row."""
    (session_id,) = submit(database)
    place(database)
    old = to(database, session_id, Stage.EXECUTE)
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(lease_until=now() - timedelta(seconds=1)))
    dispatcher = FakeDispatcher()
    assert sweep(database, dispatcher)["freed"] == 1
    freed = read(database, session_id)
    assert (freed.stage, freed.state, freed.attempt) == (Stage.EXECUTE, State.QUEUED, 2)
    assert [(session_id, "execute", "gpu0")] == dispatcher.woken
    with transaction(database) as db:
        assert set() == lifecycle.renew(db, [(session_id, 1)])
    with pytest.raises(LostLeaseError):
        advance(database, old)


def test_retries_run_out(database: Engine, lane: str) -> None:
    """After MAX_STAGE_ATTEMPTS an infrastructure fault fails the session, with its blame."""
    (session_id,) = submit(database)
    place(database)
    for _ in range(lifecycle.MAX_STAGE_ATTEMPTS):
        session = claim(database, session_id)
        assert session is not None
        with transaction(database) as db:
            lifecycle.retry(db, db.merge(session, load=False), NodeError("the disk is full"))
    ended = read(database, session_id)
    assert ended.state == State.FAILED
    assert ended.error is not None and ended.error["blame"] == "node"


def test_a_failure_stays_where_it_was(database: Engine, lane: str) -> None:
    """Stage does not move when a session fails, and the task fails if no session completed."""
    (session_id,) = submit(database)
    place(database)
    session = to(database, session_id, Stage.EVALUATE)
    with transaction(database) as db:
        lifecycle.fail(db, db.merge(session, load=False), EvaluatorError("the tests could not be run"))
    ended = read(database, session_id)
    assert (ended.stage, ended.state) == (Stage.EVALUATE, State.FAILED)
    with transaction(database) as db:
        assert queries.task(db, "task-1").state == TaskState.FAILED


def test_two_last_sessions_end_at_once_and_the_task_still_ends(database: Engine, lane: str) -> None:
    """Ends of one task are serialised by its row, so that one of them sees that it was the last."""
    ids = submit(database, num_samples=2)
    place(database)
    sessions = [to(database, session_id, Stage.EVALUATE) for session_id in ids]
    threads = [threading.Thread(target=advance, args=(database, session)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with transaction(database) as db:
        assert queries.task(db, "task-1").state == TaskState.COMPLETED


def test_a_running_name_is_refused_and_a_finished_one_may_be_used_again(database: Engine, lane: str) -> None:
    """409 while it runs; afterwards the new task takes the name and the old rows stay."""
    submit(database)
    with pytest.raises(ConflictError):
        submit(database)
    with transaction(database) as db:
        lifecycle.cancel_task(db, "task-1")
    submit(database)
    with transaction(database) as db:
        rows = db.scalars(select(Task).order_by(Task.created_at)).all()
    assert [(row.state, row.current) for row in rows] == [(TaskState.CANCELLED, False), (TaskState.RUNNING, True)]


def test_placement_prefers_priority_then_fair_shares(database: Engine, lane: str) -> None:
    """Room is max_execute + ready_buffer; a high priority goes first, then each task in turn."""
    big = submit(database, task_id="big", num_samples=10)
    small = submit(database, task_id="small", num_samples=1)
    urgent = submit(database, task_id="urgent", num_samples=1, dispatch_priority=50)
    assert [urgent[0], big[0], small[0]] == place(database)
    assert place(database) == []


def test_a_task_for_another_lane_is_not_placed(database: Engine, lane: str) -> None:
    """`lanes` restricts who may take the task."""
    submit(database, lanes=["gpu7"])
    assert place(database) == []


def test_a_draining_node_takes_nothing(database: Engine, lane: str) -> None:
    """Draining stops placement, nothing else."""
    submit(database)
    with transaction(database) as db:
        queries.nodes(db)[0].draining = True
    assert place(database) == []


def test_execute_waits_for_room(database: Engine, lane: str) -> None:
    """No more than max_execute agents run, however many messages arrive."""
    ids = submit(database, num_samples=3)
    place(database)
    for session_id in ids:
        session = claim(database, session_id)
        assert session is not None
        advance(database, session)
    claims = [claim(database, session_id, Stage.EXECUTE) for session_id in ids]
    assert [each is not None for each in claims] == [True, True, False]
    with transaction(database) as db:
        assert [ids[2]] == list(placement.waiting_to_execute(db, "gpu0"))


def test_the_budget_starts_with_prewarm_and_ends_queued_sessions(database: Engine, lane: str) -> None:
    """Queueing before prewarm is free; a queued session past its deadline is timed out by the sweeper."""
    (session_id,) = submit(database, timeout_seconds=30)
    assert read(database, session_id).deadline_at is None
    place(database)
    session = to(database, session_id, Stage.PREWARM)
    assert session.deadline_at is not None
    advance(database, session)
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(deadline_at=now() - timedelta(seconds=1)))
    assert sweep(database, FakeDispatcher())["overdue"] == 1
    assert read(database, session_id).state == State.TIMED_OUT


def test_an_emptied_broker_is_healed(database: Engine, lane: str) -> None:
    """Queued rows without a recent wake-up get one from the sweeper."""
    (session_id,) = submit(database)
    place(database)
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(woken_at=now() - timedelta(minutes=1)))
    dispatcher = FakeDispatcher()
    sweep(database, dispatcher)
    assert [(session_id, "prewarm", "gpu0")] == dispatcher.woken
    assert dispatcher.looked == ["gpu0"]


def test_cancelling_is_idempotent_and_ends_everything(database: Engine, lane: str) -> None:
    """Running and queued sessions end as cancelled; a second cancel changes nothing; a callback is owed once."""
    ids = submit(database, num_samples=2, callback_url="http://127.0.0.1:1/done")
    place(database)
    claim(database, ids[0])
    for _ in range(2):
        with transaction(database) as db:
            assert lifecycle.cancel_task(db, "task-1").state == TaskState.CANCELLED
    with transaction(database) as db:
        states = {each.state for each in db.scalars(select(RolloutSession))}
        assert len(db.scalars(select(Delivery)).all()) == 1
    assert {State.CANCELLED} == states
    assert not states & OPEN


def test_early_stop_cancels_stragglers(database: Engine, lane: str) -> None:
    """Once enough sessions completed with a trace that may train, the others are cancelled and the task completes."""
    ids = submit(database, num_samples=3, early_stop_min_usable_sessions=1)
    place(database)
    session = to(database, ids[0], Stage.EVALUATE)
    trace = {"prompt_ids": b"", "response_ids": b"", "loss_mask": b"", "fidelity": "exact", "body": b""}
    with transaction(database) as db:
        db.add(TraceRow(session_id=ids[0], number=0, trainable=True, **trace))
    advance(database, session)
    assert [read(database, each).state for each in ids] == [State.COMPLETED, State.CANCELLED, State.CANCELLED]
    with transaction(database) as db:
        assert queries.task(db, "task-1").state == TaskState.COMPLETED


def test_a_stopped_worker_gives_back_without_a_count(database: Engine, lane: str) -> None:
    """A release is a new attempt, so that the fence holds, but not one of the stage's tries."""
    (session_id,) = submit(database)
    place(database)
    for _ in range(lifecycle.MAX_STAGE_ATTEMPTS + 1):
        session = claim(database, session_id)
        assert session is not None
        with transaction(database) as db:
            lifecycle.release(db, db.merge(session, load=False))
    row = read(database, session_id)
    assert (row.state, row.stage_attempts, row.attempt) == (State.QUEUED, 1, 5)
