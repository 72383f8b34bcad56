"""What a session's own end, and enough of its task's others, do to it at each stage: deadlines and early stops."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from polar import lifecycle, placement, queries
from polar.db import transaction
from polar.leases import LeaseKeeper
from polar.lifecycle import STAGES, Stage, State, TaskState
from polar.models import RolloutSession, TraceRow
from polar.settings import Settings
from polar.stages.runner import Lane
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task, topology
from tests.integration.rig import until

pytestmark = pytest.mark.integration
TRACE = dict.fromkeys(("prompt_ids", "response_ids", "loss_mask", "body"), b"")


@pytest.fixture
def lane(database: Engine, tmp_path: Path) -> Lane:
    """A lane at work in this process."""
    node, spec = topology(max_execute=2, ready_buffer=2).lane("gpu0")
    made = Lane(database, Settings(home=str(tmp_path)), node, spec, FakeDispatcher(), LeaseKeeper(database), "w")
    made.beat()
    return made


def submit(database: Engine, **changes: Any) -> list[str]:
    """The sessions of a new task, placed as far as there is room."""
    with transaction(database) as db:
        row = lifecycle.submit(db, task(**changes))
        placement.place(db, "gpu0")
        return [each.id for each in queries.sessions_of(db, row.id)]


def claim(database: Engine, session_id: str, stage: Stage) -> RolloutSession | None:
    with transaction(database) as db:
        return lifecycle.claim(db, session_id, stage, "w")


def to(database: Engine, session_id: str, stage: Stage) -> None:
    """Queued in `stage`, by way of all before it."""
    for each in STAGES[: STAGES.index(stage)]:
        session = claim(database, session_id, each)
        assert session is not None
        with transaction(database) as db:
            lifecycle.advance(db, db.merge(session, load=False))


def read(database: Engine, session_id: str) -> RolloutSession:
    with transaction(database) as db:
        return queries.session(db, session_id)


@pytest.mark.parametrize("stage", [Stage.EXECUTE, Stage.RECONSTRUCT, Stage.EVALUATE])
def test_past_its_deadline_a_session_is_only_put_together(database: Engine, lane: Lane, stage: Stage) -> None:
    """A stage that is begun too late ends the session with its budget to blame; what was captured is still kept."""
    (session_id,) = submit(database, timeout_seconds=30)
    to(database, session_id, stage)
    with transaction(database) as db:
        late = RolloutSession.deadline_at - timedelta(seconds=31)
        db.execute(update(RolloutSession).values(deadline_at=late))
    claimed = claim(database, session_id, stage)
    row = read(database, session_id)
    if stage is Stage.RECONSTRUCT:
        assert claimed is not None and row.state == State.RUNNING
        return
    assert claimed is None and row.state == State.TIMED_OUT and row.error is not None
    assert (row.stage, row.error["blame"], row.error["code"]) == (stage, "budget", "session_timeout")
    assert "30 s" in row.error["message"]


def test_a_stage_is_ended_at_its_sessions_deadline(database: Engine, lane: Lane) -> None:
    """A step that takes longer than the session has is cut off, its runtime removed, and it is not tried again."""
    prepare = [{"type": "exec", "command": "sleep 60"}]
    (session_id,) = submit(database, timeout_seconds=1.5, runtime={"backend": "local", "prepare": prepare})
    began = time.monotonic()
    assert not lane.run(session_id, Stage.PREWARM)
    assert time.monotonic() - began < 30
    row = read(database, session_id)
    assert (row.stage, row.state, row.attempt, row.runtimes) == (Stage.PREWARM, State.TIMED_OUT, 1, {})
    assert row.error is not None and row.error["code"] == "session_timeout"
    with transaction(database) as db:
        assert queries.task(db, "task-1").state == TaskState.FAILED


def usable(database: Engine, session_id: str, *, trains: bool = True) -> None:
    """The session completes, with one trace."""
    to(database, session_id, Stage.EVALUATE)
    with transaction(database) as db:
        db.add(TraceRow(session_id=session_id, number=0, trainable=trains, fidelity="exact", **TRACE))
    session = claim(database, session_id, Stage.EVALUATE)
    assert session is not None
    with transaction(database) as db:
        lifecycle.advance(db, db.merge(session, load=False))


def test_only_usable_sessions_stop_a_task_early(database: Engine, lane: Lane) -> None:
    """One that completed with nothing to train on does not count; the one that does ends those that wait for a lane,
    those that wait on one, and the one at work, which loses its lease; and the lane has its room again."""
    ids = submit(database, num_samples=8, early_stop_min_usable_sessions=2)
    usable(database, ids[0])
    usable(database, ids[1], trains=False)
    assert [read(database, each).state for each in ids[2:]] == [State.QUEUED] * 6
    working = claim(database, ids[2], Stage.PREWARM)
    assert working is not None and read(database, ids[7]).lane is None
    lost = threading.Event()

    def work() -> None:
        with lane.leases.hold(working.id, working.attempt) as gone:
            if gone.wait(30):
                lost.set()

    thread = threading.Thread(target=work)
    thread.start()
    usable(database, ids[3])
    thread.join(40)
    assert lost.is_set()
    rows = [read(database, each) for each in ids]
    assert [row.state for row in rows] == [State.CANCELLED if n not in (0, 1, 3) else State.COMPLETED for n in range(8)]
    assert {(row.error or {}).get("message") for row in rows[4:]} == {"enough usable sessions are in"}
    with transaction(database) as db:
        assert queries.task(db, "task-1").state == TaskState.COMPLETED
    again = submit(database, task_id="next", num_samples=9)
    taken = [each for each in (read(database, session_id) for session_id in again) if each.lane == "gpu0"]
    assert len(taken) == lane.spec.max_execute + lane.spec.ready_buffer


def test_a_cancelled_agent_is_stopped_while_it_prepares(database: Engine, lane: Lane) -> None:
    """Early stop, cancel or a lost lease: the stage ends within a heartbeat, and leaves no runtime."""
    prepare = [{"type": "exec", "command": "sleep 60"}]
    (session_id,) = submit(database, runtime={"backend": "local", "prepare": prepare})
    thread = threading.Thread(target=lane.run, args=(session_id, Stage.PREWARM))
    thread.start()
    until(lambda: read(database, session_id).runtimes, 30)
    with transaction(database) as db:
        lifecycle.cancel_task(db, "task-1")
    thread.join(20)
    assert not thread.is_alive()
    lane.tidy()
    row = read(database, session_id)
    assert (row.state, row.runtimes) == (State.CANCELLED, {})
