"""Many nodes on the real tables: shares by speed, fair shares, lanes whose engine is down, and sessions that move."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import Engine, select, update

from polar import lanes, lifecycle, placement, queries, rehoming
from polar.db import transaction
from polar.errors import LostLeaseError
from polar.lifecycle import Stage, State
from polar.models import Lane, Leftover, Node, RolloutSession, SessionEvent, TraceRow, TrajectoryRow, now
from polar.sweep import sweep
from polar.topology import EngineSpec, LaneSpec, NodeSpec
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task

MINUTES = timedelta(minutes=2)


def add(database: Engine, name: str, *, max_execute: int = 2, ready_buffer: int = 0, lane: str = "gpu0") -> None:
    """A node with one lane, which says that it is here."""
    engine = EngineSpec(base_url="http://127.0.0.1:1")
    spec = LaneSpec(name=f"{name}.{lane}", engine=engine, max_execute=max_execute, ready_buffer=ready_buffer)
    with transaction(database) as db:
        lanes.beat(db, NodeSpec(id=name, lanes=(spec,)), spec)


def silence(database: Engine, name: str, since: timedelta = MINUTES) -> None:
    """A node from which nothing was heard for a while."""
    with transaction(database) as db:
        db.execute(update(Lane).where(Lane.node_id == name).values(heartbeat_at=now() - since))
        db.execute(update(Node).where(Node.id == name).values(heartbeat_at=now() - since))


def submit(database: Engine, **changes: object) -> list[str]:
    with transaction(database) as db:
        row = lifecycle.submit(db, task(**changes))
        return [each.id for each in queries.sessions_of(db, row.id)]


def place(database: Engine, name: str) -> list[str]:
    with transaction(database) as db:
        return placement.place(db, f"{name}.gpu0")


def step(database: Engine, session_id: str) -> None:
    """One stage, claimed and advanced."""
    with transaction(database) as db:
        session = queries.session(db, session_id)
        claimed = lifecycle.claim(db, session_id, Stage(session.stage), "w")
        assert claimed is not None
        lifecycle.advance(db, claimed)


def claim(database: Engine, session_id: str, stage: Stage = Stage.PREWARM) -> RolloutSession | None:
    with transaction(database) as db:
        session = lifecycle.claim(db, session_id, stage, "w")
        if session is not None:
            _ = session.task
        return session


def read(database: Engine, session_id: str) -> RolloutSession:
    with transaction(database) as db:
        return queries.session(db, session_id)


def moves(database: Engine, session_id: str) -> list[str]:
    with transaction(database) as db:
        return [event.move for event in queries.events_of(db, session_id)]


# ── placement ──────────────────────────────────────────────────────────────────────────────────────


def test_lanes_of_different_speed_share_in_proportion(database: Engine) -> None:
    """A lane that takes three times as long for each session gets a third as many: nobody reckons, both pull."""
    seconds = {"fast": 1, "slow": 3}
    for name in seconds:
        add(database, name, max_execute=2)
    submit(database, num_samples=64)
    running: dict[str, dict[str, int]] = {name: {} for name in seconds}
    done: Counter[str] = Counter()
    for _ in range(200):
        for name, each in seconds.items():
            for session_id, left in list(running[name].items()):
                running[name][session_id] = left - 1
                if left == 1:
                    del running[name][session_id]
                    for _ in range(4):
                        step(database, session_id)
                    done[name] += 1
            running[name] |= dict.fromkeys(place(database, name), each)
        if sum(done.values()) == 64:
            break
    assert done == {"fast": 48, "slow": 16}


def test_many_tasks_are_served_by_priority_then_in_fair_turns(database: Engine) -> None:
    """Of 60 tasks of all sizes, each priority is served before the next, and within one all tasks move abreast."""
    add(database, "a", max_execute=7)
    chance = random.Random(3)
    tasks: dict[str, tuple[int, str]] = {}
    for n in range(60):
        priority = chance.choice([0, 5, 9])
        ids = submit(database, task_id=f"t{n}", num_samples=chance.randint(1, 9), dispatch_priority=priority)
        tasks |= dict.fromkeys(ids, (priority, f"t{n}"))
    left = Counter(tasks.values())
    held: Counter[tuple[int, str]] = Counter()
    order: list[int] = []
    while placed := place(database, "a"):
        for session_id in placed:
            key = tasks[session_id]
            order.append(key[0])
            # Nobody of this priority who still waits has less of the lane than this task had.
            assert held[key] <= min(held[other] for other in left if other[0] == key[0] and left[other])
            held[key] += 1
            left[key] -= 1
        for session_id in placed:
            for _ in range(4):
                step(database, session_id)
            held[tasks[session_id]] -= 1
    assert not +left
    assert order == sorted(order, reverse=True)


def test_the_oldest_goes_first_among_equals(database: Engine) -> None:
    """Same priority, same share: by age."""
    add(database, "a", max_execute=3)
    ids = [submit(database, task_id=f"t{n}")[0] for n in range(5)]
    assert ids[:3] == place(database, "a")


def test_a_lane_whose_engine_is_down_takes_nothing(database: Engine) -> None:
    """It says so once, starts no agent, gives back what it has not begun, and pulls again when the engine is back."""
    add(database, "a")
    first, second = submit(database, num_samples=2)
    assert [first, second] == place(database, "a")
    step(database, first)
    with transaction(database) as db:
        assert lanes.note_engine(db, "a.gpu0", "the engine at http://127.0.0.1:1 does not answer")
        assert not lanes.note_engine(db, "a.gpu0", "still")
        (lane,) = queries.lanes(db)
        assert lanes.state(lane, alive=True, draining=False) == "engine_down"
        assert "does not answer" in str(lane.engine_error)
        assert lanes.takers(db) == [] and len(lanes.alive(db)) == 1
    assert claim(database, first, Stage.EXECUTE) is None
    dispatcher = FakeDispatcher()
    assert sweep(database, dispatcher)["unplaced"] == 1
    assert read(database, second).lane is None and read(database, first).lane == "a.gpu0"
    assert place(database, "a") == [] and dispatcher.looked == []
    with transaction(database) as db:
        assert lanes.note_engine(db, "a.gpu0", None)
        assert not lanes.note_engine(db, "a.gpu0", None)
    assert [second] == place(database, "a")
    assert claim(database, first, Stage.EXECUTE) is not None


# ── a node that is gone ────────────────────────────────────────────────────────────────────────────


def begun(database: Engine, stage: Stage) -> str:
    """A session that is queued in `stage` on node a, with a runtime there."""
    (session_id,) = submit(database)
    place(database, "a")
    while read(database, session_id).stage != stage:
        step(database, session_id)
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(runtimes={"agent": {"workspace": "/there"}}))
    return session_id


def test_a_session_of_a_node_that_is_gone_begins_again_elsewhere(database: Engine) -> None:
    """Another attempt, from prewarm, with its whole time; what it left is kept for its old node."""
    add(database, "a")
    session_id = begun(database, Stage.EXECUTE)
    old = claim(database, session_id, Stage.EXECUTE)
    assert old is not None
    silence(database, "a")
    add(database, "b")
    with transaction(database) as db:
        db.execute(update(RolloutSession).values(lease_until=now() - timedelta(seconds=1)))
    counts = sweep(database, FakeDispatcher())
    assert (counts["freed"], counts["rehomed"]) == (1, 1)
    row = read(database, session_id)
    assert (row.stage, row.state, row.attempt, row.lane, row.node_id) == ("prewarm", "queued", 3, None, None)
    assert (row.deadline_at, row.key_hash, row.runtimes) == (None, None, {})
    assert moves(database, session_id)[-2:] == ["retry", "rehome"]
    with transaction(database) as db:
        (left,) = lanes.left_behind(db, "a")
        assert (left.session_id, left.handle) == (session_id, {"workspace": "/there"})
        assert lanes.left_behind(db, "b") == []
        lanes.taken_away(db, left.id)
        assert not db.scalars(select(Leftover)).all()
    with pytest.raises(LostLeaseError), transaction(database) as db:
        lifecycle.advance(db, db.merge(old, load=False))
    assert [session_id] == place(database, "b")
    with transaction(database) as db:
        placed = queries.events_of(db, session_id)[-1]
        assert (placed.move, placed.attempt) == ("place", 3)
    with transaction(database) as db:  # a message that waited for node a in the broker
        assert lifecycle.claim(db, session_id, Stage.PREWARM, "w", "a.gpu0") is None
        assert lifecycle.claim(db, session_id, Stage.PREWARM, "w", "b.gpu0") is not None


def test_nobody_moves_while_there_is_nobody_else(database: Engine) -> None:
    """A single node that is started again finds its sessions as they were."""
    add(database, "a")
    session_id = begun(database, Stage.EXECUTE)
    silence(database, "a")
    assert sweep(database, FakeDispatcher())["rehomed"] == 0
    assert read(database, session_id).lane == "a.gpu0"


def test_a_session_only_moves_to_a_lane_that_its_task_allows(database: Engine) -> None:
    """`lanes` holds also then."""
    add(database, "a")
    (session_id,) = submit(database, lanes=["a.gpu0", "c.gpu0"])
    place(database, "a")
    step(database, session_id)
    silence(database, "a")
    add(database, "b")
    assert sweep(database, FakeDispatcher())["rehomed"] == 0
    add(database, "c")
    assert sweep(database, FakeDispatcher())["rehomed"] == 1


@pytest.mark.parametrize("stage", [Stage.RECONSTRUCT, Stage.EVALUATE])
def test_finished_agents_are_waited_for_longer(database: Engine, stage: Stage) -> None:
    """Their runtimes are on the node: it has a minute to come back; then the attempt's traces go with it."""
    add(database, "a")
    session_id = begun(database, stage)
    with transaction(database) as db:
        db.add(TrajectoryRow(session_id=session_id, attempt=1, builder="per_request"))
    silence(database, "a", timedelta(seconds=30))
    add(database, "b")
    assert sweep(database, FakeDispatcher())["rehomed"] == 0
    silence(database, "a", timedelta(seconds=rehoming.PATIENCE_SECONDS + 1))
    assert sweep(database, FakeDispatcher())["rehomed"] == 1
    with transaction(database) as db:
        assert not db.scalars(select(TrajectoryRow)).all() and not db.scalars(select(TraceRow)).all()


def test_a_lane_that_starts_later_than_its_neighbour_keeps_finished_agents(database: Engine) -> None:
    """Both lanes of a node come back one after the other: the first does not take the second's work."""
    add(database, "a")
    session_id = begun(database, Stage.EVALUATE)
    silence(database, "a")
    add(database, "a", lane="gpu1")
    assert sweep(database, FakeDispatcher())["rehomed"] == 0
    assert read(database, session_id).stage == Stage.EVALUATE


def test_a_session_that_takes_its_nodes_with_it_ends(database: Engine) -> None:
    """Lost with MAX_REHOMES nodes it is not tried on another."""
    add(database, "b")
    (session_id,) = submit(database)
    for _ in range(lifecycle.MAX_REHOMES + 1):
        add(database, "a")
        silence(database, "b", timedelta(seconds=1))
        with transaction(database) as db:
            db.execute(update(RolloutSession).values(lane="a.gpu0", node_id="a"))
        step(database, session_id)
        silence(database, "a")
        sweep(database, FakeDispatcher())
    row = read(database, session_id)
    assert row.state == State.FAILED and row.error is not None
    assert (row.error["blame"], row.error["code"]) == ("node", "lost_node")
    with transaction(database) as db:
        found = db.scalars(select(SessionEvent).where(SessionEvent.move == "rehome")).all()
        assert len(found) == lifecycle.MAX_REHOMES


# ── clocks ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("hours", [-3, 3])
def test_leases_do_not_go_by_a_nodes_own_clock(database: Engine, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """A worker whose time of day is hours off holds its lease like any other, and so does its lane."""
    add(database, "b")
    (session_id,) = submit(database)
    for module in (lifecycle, placement):
        monkeypatch.setattr(module, "now", lambda: now() + timedelta(hours=hours))
    add(database, "a")
    place(database, "a")
    assert claim(database, session_id) is not None
    with transaction(database) as db:
        assert {session_id} == lifecycle.renew(db, [(session_id, 1)])
    monkeypatch.undo()
    counts = sweep(database, FakeDispatcher())
    assert (counts["freed"], counts["overdue"], counts["rehomed"]) == (0, 0, 0)
    row = read(database, session_id)
    assert row.lease_until is not None and abs((row.lease_until - now()).total_seconds()) < 30
    with transaction(database) as db:
        assert {"a.gpu0", "b.gpu0"} == {lane.name for lane in lanes.alive(db)}
