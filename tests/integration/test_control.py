"""Cancelling at every moment, and leases that run out: nobody who was told to stop writes anything afterwards."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, make_url, select

from polar import lanes, lifecycle, placement, queries
from polar.api import create_app
from polar.db import connect, transaction
from polar.errors import LostLeaseError
from polar.leases import LeaseKeeper
from polar.lifecycle import STAGES, Stage, State, TaskState
from polar.models import Completion, Proxy, RolloutSession, SessionEvent, now
from polar.settings import Settings
from polar.stages.base import Job
from polar.stages.proxy_fault import proxy_fault
from polar.topology import NodeSpec
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task, task_body, topology

QUEUED = "queued"


@pytest.fixture
def api(database_url: str, database: Engine) -> Iterator[FlaskClient]:
    """The API, and one lane alive."""
    node, spec = topology(max_execute=4).lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, spec)
    app = create_app(Settings(database_url=database_url, auth="open"), FakeDispatcher())
    with app.test_client() as client:
        yield client
    app.config["DATABASE"].dispose()


def submit(api: FlaskClient, database: Engine, **changes: Any) -> list[str]:
    api.post("/rollout/task/submit", json=task_body(**changes))
    with transaction(database) as db:
        return [each.id for each in queries.sessions_of(db, queries.task(db, "task-1").id)]


def place(database: Engine) -> None:
    with transaction(database) as db:
        placement.place(db, "gpu0")


def claim(database: Engine, session_id: str, stage: Stage) -> RolloutSession:
    with transaction(database) as db:
        session = lifecycle.claim(db, session_id, stage, "w")
        assert session is not None
        _ = session.task
        return session


def to(database: Engine, session_id: str, stage: Stage, state: str) -> RolloutSession | None:
    """Bring a placed session to this stage; what its worker holds there, if it runs."""
    for each in STAGES:
        if (each, state) == (stage, QUEUED):
            return None
        held = claim(database, session_id, each)
        if each is stage:
            return held
        with transaction(database) as db:
            lifecycle.advance(db, db.merge(held, load=False))
    raise AssertionError


# ── cancelling ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["task", "session"])
@pytest.mark.parametrize("state", [QUEUED, "running"])
@pytest.mark.parametrize("stage", STAGES)
def test_cancelled_at_each_stage_twice(api: FlaskClient, database: Engine, stage: Stage, state: str, what: str) -> None:
    """It ends there and then, once; its worker can renew and write nothing; the second cancel changes nothing."""
    first, other = submit(api, database, num_samples=2)
    place(database)
    held = to(database, first, stage, state)
    path = "/rollout/task/task-1" if what == "task" else f"/rollout/session/{first}"
    answers = [api.delete(path) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json["status"] == answers[1].json["status"]
    with transaction(database) as db:
        row = queries.session(db, first)
        assert (row.stage, row.state, row.key_hash, row.lease_until) == (stage, State.CANCELLED, None, None)
        moves = [event.move for event in queries.events_of(db, first)]
        assert moves.count("cancel") == 1 and moves[-1] == "cancel"
        others = State.CANCELLED if what == "task" else State.QUEUED
        assert queries.session(db, other).state == others
        wanted = TaskState.CANCELLED if what == "task" else TaskState.RUNNING
        assert queries.task(db, "task-1").state == wanted
        if held is not None:
            assert lifecycle.renew(db, [(first, held.attempt)]) == set()
    if held is not None:
        with pytest.raises(LostLeaseError), transaction(database) as db:
            lifecycle.advance(db, db.merge(held, load=False))
        with pytest.raises(LostLeaseError), transaction(database) as db:
            lifecycle.held_row(db, held)


def test_cancelled_before_any_lane_has_it(api: FlaskClient, database: Engine) -> None:
    """A session that is not placed yet ends, too; cancelling all of a task's sessions one by one ends the task."""
    ids = submit(api, database, num_samples=2)
    for session_id in ids:
        assert api.delete(f"/rollout/session/{session_id}").json["state"] == "cancelled"
    place(database)
    assert api.get("/rollout/task/task-1").json["status"] == "failed"
    assert api.delete("/rollout/session/nobody").status_code == 404


def test_cancelled_before_it_is_submitted(api: FlaskClient, database: Engine) -> None:
    """A cancel that overtakes its submit is remembered where that is asked for: the submit is refused, and says why."""
    path = "/rollout/task/task-1"
    assert api.delete(path).status_code == 404
    assert api.delete(f"{path}?register_if_missing=maybe").status_code == 422
    for _ in range(2):
        answer = api.delete(f"{path}?register_if_missing=true").json
        assert (answer["status"], answer["total_sessions"]) == ("cancelled", 0)
    refused = api.post("/rollout/task/submit", json=task_body())
    assert (refused.status_code, refused.json["code"]) == (409, "task_cancelled")
    assert api.get("/tasks").json["tasks"] == []
    assert api.get("/rollout/status").status_code == 200
    with transaction(database) as db:
        queries.task(db, "task-1").created_at = now().replace(year=2000)
    assert api.post("/rollout/task/submit", json=task_body()).status_code == 200


@pytest.mark.parametrize("turn", range(4))
def test_cancel_and_submit_at_once(api: FlaskClient, database: Engine, turn: int) -> None:
    """Whoever comes first (tried several times), no session is left that was to be cancelled."""
    answers: dict[str, Any] = {}
    app = api.application

    def ask(what: str) -> None:
        with app.test_client() as client:
            if what == "submit":
                answers[what] = client.post("/rollout/task/submit", json=task_body()).status_code
            else:
                answers[what] = client.delete("/rollout/task/task-1?register_if_missing=true").status_code

    threads = [threading.Thread(target=ask, args=(what,)) for what in ("cancel", "submit")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["submit"] in (200, 409) and answers["cancel"] == 200
    with transaction(database) as db:
        sessions = db.scalars(select(RolloutSession)).all()
    assert {each.state for each in sessions} <= {State.CANCELLED}
    assert bool(sessions) == (answers["submit"] == 200)


def test_a_drained_node_is_resumed(api: FlaskClient, database: Engine) -> None:
    """DELETE takes it out, POST …/resume puts it back and has its lanes look for work."""
    assert api.get("/nodes/node-1").json["lanes"][0]["state"] == "pulling"
    assert api.delete("/nodes/node-1").json["draining"]
    assert api.get("/nodes/node-1").json["lanes"][0]["state"] == "draining"
    with transaction(database) as db:
        lifecycle.submit(db, task())
        assert placement.place(db, "gpu0") == []
    assert not api.post("/nodes/node-1/resume").json["draining"]
    assert api.application.config["DISPATCHER"].looked == ["gpu0"]
    assert api.post("/nodes/nobody/resume").status_code == 404
    with transaction(database) as db:
        assert len(placement.place(db, "gpu0")) == 1


# ── leases ─────────────────────────────────────────────────────────────────────────────────────────


class Line:
    """A TCP line to a server that can be cut without a word, as a cable is."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.whole = threading.Event()
        self.whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.whole.wait()
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()

    def close(self) -> None:
        """No more connections."""
        self._door.close()
        self.whole.set()


def test_a_holder_that_is_cut_off_stops_by_itself(
    api: FlaskClient, database: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line to the database cut, the lease counts as lost as soon as it has run out, answer or no answer."""
    monkeypatch.setattr(lifecycle, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(lifecycle, "LEASE_SECONDS", 2.0)
    url = make_url(database_url)
    line = Line(str(url.host), int(url.port or 0))
    far = connect(url.set(host="127.0.0.1", port=line.port).render_as_string(hide_password=False), pool_size=1)
    (session_id,) = submit(api, database)
    place(database)
    claim(database, session_id, Stage.PREWARM)
    with LeaseKeeper(far).hold(session_id, 1) as lost:
        assert not lost.wait(3.0)
        line.whole.clear()
        cut = time.monotonic()
        assert lost.wait(5.0)
        assert 1.5 < time.monotonic() - cut < 4.5
    line.close()
    far.dispose()


# ── a proxy that dies ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def health() -> Iterator[str]:
    """Something that answers like a proxy that lives."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the library's name
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def call(database: Engine, session: RolloutSession, outcome: str, **values: Any) -> None:
    """A call of this attempt, as the record has it."""
    with transaction(database) as db:
        common = {"dialect": "openai_chat", "parent_reason": "first", "model_requested": "m", "request": b""}
        finished = None if outcome == "asked" else now()
        row = Completion(id=f"cmp-{outcome}", session_id=session.id, attempt=session.attempt, outcome=outcome)
        for name, value in {**common, "finished_at": finished, **values}.items():
            setattr(row, name, value)
        db.add(row)


@pytest.mark.parametrize(
    ("outcome", "error", "restarted", "up", "said"),
    [
        ("asked", None, False, True, "died with call cmp-asked in flight"),
        ("failed", {"blame": "node", "code": "not_recorded"}, False, True, "could not answer call cmp-failed"),
        ("failed", {"blame": "engine", "code": "engine_down"}, False, True, None),
        ("answered", None, True, True, "was started again after the agent's last answer"),
        ("answered", None, False, False, "does not answer"),
        ("answered", None, False, True, None),
        (None, None, False, True, None),
    ],
)
def test_what_a_failed_agents_proxy_did(
    api: FlaskClient,
    database: Engine,
    health: str,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str | None,
    error: dict[str, str] | None,
    restarted: bool,
    up: bool,
    said: str | None,
) -> None:
    """Its record, its processes and itself tell whether it was the proxy that the agent failed on."""
    monkeypatch.setattr("polar.stages.proxy_fault.SETTLES_SECONDS", 0.3)
    (session_id,) = submit(api, database)
    place(database)
    session = to(database, session_id, Stage.EXECUTE, "running")
    assert session is not None
    if outcome is not None:
        call(database, session, outcome, error=error)
    with transaction(database) as db:
        long_ago = now().replace(year=2000)
        figures = {"epoch": 0, "in_flight": 0, "held": 0, "drained": 0, "aborted": 0}
        db.add(Proxy(id="old", node_id="node-1", started_at=long_ago, **figures))
        db.add(Proxy(id="elsewhere", node_id="node-2", started_at=now(), **figures))
        if restarted:
            db.add(Proxy(id="new", node_id="node-1", started_at=now(), **figures))
    node = NodeSpec(id="node-1", public_url=health if up else "http://127.0.0.1:9")
    _, lane = topology().lane("gpu0")
    job = Job(session, task(), database, Settings(), node, lane, threading.Event())
    found = proxy_fault(job)
    assert found is None if said is None else found is not None and said in found
    with transaction(database) as db:
        assert db.scalars(select(SessionEvent).where(SessionEvent.move == "retry")).all() == []
