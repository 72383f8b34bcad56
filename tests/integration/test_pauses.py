"""While the gate is closed, the clocks of sessions, agents and recordings stand still."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine, select, update

from polar import lanes, lifecycle, placement, policy, queries
from polar.db import transaction
from polar.leases import LeaseKeeper
from polar.lifecycle import Stage, State
from polar.models import Policy, RolloutSession, now
from polar.recording import open_session
from polar.runtimes.base import Limits
from polar.session_clock import Pauses, SessionClock
from polar.settings import Settings
from polar.spec import RuntimeSpec
from polar.stages.base import Job
from polar.sweep import sweep
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task, topology
from tests.integration.rig import until


@pytest.fixture
def lane(database: Engine) -> str:
    """A lane that has said that it is here."""
    node, spec = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, spec)
    return "gpu0"


def gate(database: Engine, mode: str) -> None:
    with transaction(database) as db:
        policy.change(db, gate=mode)


def long_closed(database: Engine, seconds: float = 100) -> None:
    """As if the pause that goes on had begun so much earlier."""
    with transaction(database) as db:
        db.execute(update(Policy).values(closed_at=Policy.closed_at - timedelta(seconds=seconds)))


def begin(database: Engine, **changes: object) -> RolloutSession:
    """A session that was placed and is being prewarmed."""
    with transaction(database) as db:
        row = lifecycle.submit(db, task(**changes))
        (session_id,) = [each.id for each in queries.sessions_of(db, row.id)]
        placement.place(db, "gpu0")
    with transaction(database) as db:
        session = lifecycle.claim(db, session_id, Stage.PREWARM, "w")
        assert session is not None
        _ = session.task
        return session


def deadline(database: Engine, session_id: str) -> datetime:
    with transaction(database) as db:
        found = queries.session(db, session_id).deadline_at
    assert found is not None
    return found


def test_a_deadline_is_put_off_by_the_pause(database: Engine, lane: str) -> None:
    """Resuming adds the pause to every open session's deadline, once; a change of mode in between adds nothing."""
    session = begin(database, timeout_seconds=30)
    before = deadline(database, session.id)
    gate(database, "drain")
    long_closed(database)
    gate(database, "abort")
    assert deadline(database, session.id) == before
    gate(database, "open")
    gate(database, "open")
    gained = (deadline(database, session.id) - before).total_seconds()
    assert 100 <= gained < 110
    with transaction(database) as db:
        assert policy.pauses(db) == Pauses(pytest.approx(gained, abs=0.01), None)


def test_nothing_is_overdue_while_paused(database: Engine, lane: str) -> None:
    """A queued session whose time would have run out during the pause is still there after it, with what it had."""
    session = begin(database, timeout_seconds=30)
    with transaction(database) as db:
        lifecycle.advance(db, db.merge(session, load=False))
    gate(database, "drain")
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(deadline_at=RolloutSession.deadline_at - timedelta(seconds=99)))
    long_closed(database)
    assert sweep(database, FakeDispatcher())["overdue"] == 0
    with transaction(database) as db:
        assert lifecycle.claim(db, session.id, Stage.EXECUTE, "w") is not None
    gate(database, "open")
    left = (deadline(database, session.id) - now()).total_seconds()
    assert 25 < left < 35


def test_a_session_that_begins_during_a_pause_has_its_whole_time(database: Engine, lane: str) -> None:
    """Its clock starts when the gate opens, not when it closed."""
    gate(database, "drain")
    long_closed(database)
    session = begin(database, timeout_seconds=30)
    gate(database, "open")
    left = (deadline(database, session.id) - now()).total_seconds()
    assert 25 < left <= 31


def test_an_agents_clock_stands_still(database: Engine, lane: str) -> None:
    """Its budget and its session's count on only once the gate is open, also for a claim in the middle of the pause."""
    keeper = LeaseKeeper(database)
    node, spec = topology().lane("gpu0")
    gate(database, "drain")
    long_closed(database)
    session = begin(database, timeout_seconds=30)
    with transaction(database) as db:
        known = policy.pauses(db)
    keeper.clock.heard(known)
    place = (database, Settings(), node, spec)
    job = Job(session, task(), *place, threading.Event(), keeper.clock, known.closed_for or 0.0)
    limits = job.limits(5.0)
    time.sleep(0.3)
    assert limits.left() == 5.0 and not job.out_of_time
    assert 29.5 < (job.limits().left() or 0) < 30.5
    gate(database, "open")
    with keeper.hold(session.id, session.attempt) as lost:
        until(lambda: (limits.left() or 0) < 5.0)
        assert not lost.is_set()
    assert (limits.left() or 0) > 1.0


def test_a_command_outlives_its_time_by_the_pause(tmp_path: object) -> None:
    """Limits that stand still do not end a command; once they run again, they do."""
    from pathlib import Path

    from polar import runtimes

    clock = SessionClock()
    clock.heard(Pauses(0.0, 0.0))
    made = runtimes.create(RuntimeSpec(backend="local"), "s", Path(str(tmp_path)) / "w")
    made.start(Limits(30))
    began = time.monotonic()
    threading.Timer(1.5, lambda: clock.heard(Pauses(time.monotonic() - began))).start()
    result = made.exec("sleep 20", limits=Limits(0.5, clock=clock))
    made.destroy()
    assert result.timed_out and 1.9 < time.monotonic() - began < 10


def test_a_recording_is_not_closed_by_a_pause(database: Engine, lane: str) -> None:
    """Its lease is its whole time: it stands still, and goes on."""
    with transaction(database) as db:
        opened = open_session(db, task(timeout_seconds=30, agent={"harness": "external"}))
        session_id = opened.session.id
    gate(database, "drain")
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(lease_until=RolloutSession.lease_until - timedelta(seconds=99)))
    long_closed(database)
    assert sweep(database, FakeDispatcher())["freed"] == 0
    gate(database, "open")
    assert sweep(database, FakeDispatcher())["freed"] == 0
    with transaction(database) as db:
        row = db.scalars(select(RolloutSession)).one()
        assert (row.id, row.state) == (session_id, State.RUNNING)
        assert row.lease_until is not None and 25 < (row.lease_until - now()).total_seconds() < 35
