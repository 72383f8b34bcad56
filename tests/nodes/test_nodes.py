"""Several nodes at their own addresses share one Postgres and one broker; one is cut off, drained, added."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from sqlalchemy import func, select

from polar.lifecycle import ENDED
from polar.models import Completion, Leftover, RolloutSession
from polar.runtimes import tree
from tests.chaos.agent import TURNS
from tests.chaos.scene import environ, until
from tests.nodes.network import impossible
from tests.nodes.scene import Scene, by_node

ALL = os.environ.get("POLAR_TEST_NODES") == "all"
REASON = impossible()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
whole = pytest.mark.skipif(not ALL, reason="part of the long form: POLAR_TEST_NODES=all, or make test-nodes")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The center, and nodes a and b."""
    found = Scene(tmp_path_factory.mktemp("nodes"))
    try:
        found.start("a", "b")
        yield found
    finally:
        codes = found.stop()
    assert set(codes.values()) == {0}, codes


def check(scene: Scene, sessions: list[RolloutSession]) -> None:
    """Every session completed, ended once, and has each of its calls once, made at its own node's proxy."""
    for session in sessions:
        assert session.state == "completed", (session.id, session.state, session.error)
        assert (session.agent_exit or {}).get("state") == "completed", session.agent_exit
        assert [event.move for event in scene.events(session.id) if event.state in ENDED] == ["advance"]
        calls = select(func.count()).where(
            Completion.session_id == session.id,
            Completion.attempt == session.execute_attempt,
            Completion.outcome == "answered",
        )
        assert scene.read(lambda db, calls=calls: db.scalar(calls)) == TURNS
        url = (scene.seen / f"{session.id}.url").read_text().strip()
        assert url == f"http://{scene.network.address(str(session.node_id))}:8100/v1"


@whole
def test_lanes_share_the_work_by_their_speed(scene: Scene) -> None:
    """A lane whose engine takes three times as long does about a third as many sessions."""
    sessions = scene.wait(scene.submit(24))
    check(scene, sessions)
    done = by_node(sessions)
    assert done.keys() == {"a", "b"}
    assert 1.5 <= done["a"] / done["b"] <= 4.5, done


@whole
def test_a_drained_node_finishes_what_it_has(scene: Scene) -> None:
    """From the drain on it takes nothing; what it had ends there, at the first attempt; resumed, it pulls again."""
    name = scene.submit(14)
    until(lambda: [s for s in scene.sessions(name) if s.node_id == "b" and s.stage == "execute"], 30)
    assert scene.http.delete("/nodes/b").json()["draining"]
    assert scene.lane("b") == "draining"
    had = {session.id for session in scene.sessions(name) if session.node_id == "b"}
    sessions = scene.wait(name)
    check(scene, sessions)
    assert {session.id for session in sessions if session.node_id == "b"} == had
    assert {session.attempt for session in sessions} == {1}
    scene.http.post("/nodes/b/resume").raise_for_status()
    assert by_node(scene.wait(scene.submit(1, lanes=["b.gpu0"]))) == {"b": 1}


@whole
def test_a_pause_holds_on_every_node(scene: Scene) -> None:
    """One call, and nobody samples anywhere; no session loses time by it, and all go on after one call."""
    name = scene.submit(8, timeout_seconds=60)
    until(lambda: {s.node_id for s in scene.sessions(name) if s.stage == "execute" and s.turns} == {"a", "b"}, 40)
    held = scene.http.post("/rollout/pause", params={"mode": "drain", "wait": 15}).json()
    assert held["holds"] and {proxy["node_id"] for proxy in held["proxies"]} == {"a", "b"}
    before = {session.id: (session.turns, session.deadline_at) for session in scene.sessions(name)}
    time.sleep(3.0)
    assert {session.id: session.turns for session in scene.sessions(name)} == {
        each: n for each, (n, _) in before.items()
    }
    scene.http.post("/rollout/resume").raise_for_status()
    for session in scene.sessions(name):
        if (deadline := before[session.id][1]) is not None and session.ended_at is None:
            assert (session.deadline_at - deadline).total_seconds() > 3.0
    check(scene, scene.wait(name))


@whole
def test_a_node_that_is_added_takes_its_share(scene: Scene) -> None:
    """Started while the others are busy, it pulls from the same pool, and nobody has to be told."""
    names = [scene.submit(12)]
    scene.launch_node("c")
    while scene.lane("c") != "pulling":
        if sum(session.ended_at is None for session in scene.sessions(names[-1])) < 8:
            names.append(scene.submit(8))
        time.sleep(0.5)
    names.append(scene.submit(16))
    done: Counter[str] = Counter()
    for name in names:
        sessions = scene.wait(name)
        check(scene, sessions)
        done += by_node(sessions)
    assert done["c"] >= 4, (done, scene.log("c"))


def test_a_node_that_is_cut_off_is_replaced_and_fenced(scene: Scene) -> None:
    """Its sessions are done again elsewhere, what it says afterwards counts for nothing, and it takes up work again."""
    name = scene.submit(14)  # more than the other nodes have room for

    def on_a() -> list[RolloutSession]:
        return [session for session in scene.sessions(name) if session.node_id == "a"]

    until(lambda: [session for session in on_a() if session.turns], 40, lambda: scene.log("a"))
    scene.network.cut("a")
    lost = {session.id for session in on_a()}
    early = {session.id for session in on_a() if session.stage in ("prewarm", "execute")}
    until(lambda: all(_rehomed(scene, each) for each in early), 45, lambda: scene.log("center"))
    scene.network.heal("a")
    sessions = scene.wait(name)
    check(scene, sessions)
    assert early and {s.node_id for s in sessions if s.id in early} <= {"a", "b", "c"}
    for session in sessions:
        if session.id in early:
            _nothing_counts_of_the_old_attempt(scene, session)
        elif session.id not in lost:
            assert session.attempt == 1
    until(lambda: scene.lane("a") == "pulling", 60, lambda: scene.log("a"))
    until(lambda: not _left_on_a(scene), 40, lambda: str(_left_on_a(scene)))
    again = scene.wait(scene.submit(2, lanes=["a.gpu0"]))
    check(scene, again)


def _rehomed(scene: Scene, session_id: str) -> bool:
    """Or placed again, where it had not begun."""
    return any(event.move in ("rehome", "place") for event in scene.events(session_id)[2:])


def _nothing_counts_of_the_old_attempt(scene: Scene, session: RolloutSession) -> None:
    events = scene.events(session.id)
    moved = [event for event in events if event.move == "rehome"]
    if not moved:  # it had only been placed
        return
    assert moved[0].note["code"] == "lost_node" and moved[0].note["node"] == "a"
    after = [event for event in events if event.id > moved[0].id]
    assert min(event.attempt for event in after) > moved[0].attempt - 1
    query = select(Completion).where(Completion.session_id == session.id, Completion.attempt < moved[0].attempt)
    for row in scene.read(lambda db: list(db.scalars(query))):
        assert row.outcome != "answered" or row.finished_at < moved[0].at, (row.id, row.outcome, row.finished_at)


def _left_on_a(scene: Scene) -> list[str]:
    """Rows, processes and folders of sessions that node a was to remove."""
    rows = scene.read(lambda db: list(db.scalars(select(Leftover.session_id))))
    spaces = scene.folder / "a" / "workspaces"
    found = [f"row {each}" for each in rows] + [str(path) for path in spaces.glob("*/*")]
    for pid in tree.processes():
        try:
            given = environ(pid)
        except OSError:
            continue
        if tree.RUNTIME_MARK in given and given.get("SESSION_DIR", "").startswith(str(spaces)):
            found.append(f"process {pid}")
    return found
