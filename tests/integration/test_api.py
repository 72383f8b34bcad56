"""The REST API on real Postgres, as a trainer's client sees it; nothing is executed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine

from polar import keys, lanes
from polar.api import create_app
from polar.db import transaction
from polar.settings import Settings
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task_body, topology


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
def client(database_url: str, database: Engine, dispatcher: FakeDispatcher) -> Iterator[FlaskClient]:
    """A client with a key of all scopes, and one lane alive."""
    node, lane = topology().lane("gpu0")
    with transaction(database) as db:
        key = keys.make(db, "test")
        lanes.beat(db, node, lane)
    app = create_app(Settings(database_url=database_url), dispatcher)
    with app.test_client() as client:
        client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {key}"
        yield client
    app.config["DATABASE"].dispose()


def submit(client: FlaskClient, **changes: Any) -> Any:
    return client.post("/rollout/task/submit", json=task_body(**changes))


def test_submit_answers_once_the_task_is_kept(client: FlaskClient, dispatcher: FakeDispatcher) -> None:
    """The original's answer, the task readable at once, and the lane told to look after the commit."""
    answer = submit(client, num_samples=3)
    assert answer.json == {"task_id": "task-1", "status": "running"}
    status = client.get("/rollout/task/task-1").json
    assert (
        status["status"],
        status["total_sessions"],
        status["completed_sessions"],
        status["results"],
    ) == ("running", 3, 0, [])
    assert dispatcher.looked == ["gpu0"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"num_samples": 0}, "num_samples"),
        ({"timeout_seconds": -1}, "timeout_seconds"),
        ({"task_id": "../etc"}, "task_id"),
        ({"callback_url": "file:///etc/passwd"}, "callback_url"),
        ({"agent": {"harness": "no_such"}}, "agent.harness"),
        ({"agent": {"harness": "shell"}}, "agent"),
        ({"builder": {"strategy": "no_such"}}, "builder.strategy"),
        ({"evaluator": {"strategy": "no_such"}}, "evaluator.strategy"),
        ({"evaluator": {"strategy": "command", "config": {"comand": "x"}}}, "evaluator.config.comand"),
        ({"runtime": {"backend": "no_such"}}, "runtime.backend"),
        ({"runtime": {"backend": "local", "gpus": 1}}, "runtime.gpus"),
        ({"runtime": {"backend": "local", "prepare": [{"type": "exec"}]}}, "runtime.prepare.0"),
        ({"metadata": {"agent_timeout": "soon"}}, "metadata.agent_timeout"),
        ({"num_samples": 1, "early_stop_min_usable_sessions": 2}, "early_stop_min_usable_sessions"),
    ],
)
def test_a_wrong_field_is_named(client: FlaskClient, changes: dict[str, Any], field: str) -> None:
    """Each wrong spec is a 422 problem document that names the field, and nothing is kept."""
    answer = submit(client, **changes)
    assert answer.status_code == 422
    assert answer.mimetype == "application/problem+json"
    assert field in [error["field"] for error in answer.json["errors"]]
    assert client.get("/rollout/task/task-1").status_code == 404


def test_bad_json_is_a_problem_too(client: FlaskClient) -> None:
    """A body that is not JSON, or not an object, is refused with a reason."""
    assert "not valid JSON" in client.post("/rollout/task/submit", data=b"{").json["detail"]
    assert "must be a JSON object" in client.post("/rollout/task/submit", data=b"[]").json["detail"]


def test_a_running_name_conflicts(client: FlaskClient) -> None:
    """409 for a duplicate running task_id."""
    submit(client)
    answer = submit(client)
    assert (answer.status_code, answer.json["code"]) == (409, "task_running")


def test_cancel_is_idempotent(client: FlaskClient) -> None:
    """Cancelling twice is the same as once; the sessions end as the original's ERROR."""
    submit(client, num_samples=2)
    for _ in range(2):
        answer = client.delete("/rollout/task/task-1").json
        assert (answer["status"], answer["completed_sessions"]) == ("cancelled", 2)
    result = client.get("/rollout/task/task-1").json["results"][0]
    assert result["status"] == "ERROR"
    assert {"register_to_init_queue_ms", "init_ms", "run_ms", "postrun_ms"} == result["timing"].keys()


def test_unknown_things_are_404(client: FlaskClient) -> None:
    """Tasks, sessions, nodes and paths that are not there say so."""
    for path in ("/rollout/task/x", "/rollout/session/x", "/nodes/x", "/tasks/x/sessions", "/nowhere"):
        answer = client.get(path)
        assert (answer.status_code, answer.mimetype) == (404, "application/problem+json")


def test_the_originals_overviews(client: FlaskClient) -> None:
    """/health, /nodes, /tasks and /rollout/status have the original's fields."""
    submit(client, num_samples=2)
    assert client.get("/health").json == {"status": "ok", "nodes": 1}
    (node,) = client.get("/nodes").json
    assert (node["node_id"], node["healthy"], node["draining"]) == ("node-1", True, False)
    metrics = {"init_queue_depth", "init_inflight", "ready_depth", "run_inflight"}
    assert metrics | {"postrun_queue_depth", "postrun_inflight"} == node["metrics"].keys()
    (row,) = client.get("/tasks?status=running&harness=shell&limit=5").json["tasks"]
    assert (
        row["task_id"],
        row["harness"],
        row["num_samples"],
        row["completed_sessions"],
        row["source"],
    ) == ("task-1", "shell", 2, 0, "live")
    status = client.get("/rollout/status").json
    assert (status["tasks"], status["pipeline"]["pending_sessions"]) == ({"task-1": "running"}, 2)
    assert client.get("/tasks?limit=0").status_code == 422


def test_draining_a_node(client: FlaskClient) -> None:
    """DELETE /nodes/{id} stops new work there and shows it."""
    assert client.delete("/nodes/node-1").json["draining"]
    assert client.get("/nodes/node-1").json["draining"]


def test_keys(client: FlaskClient, database: Engine) -> None:
    """No key, an unknown key and a key without the scope are refused; Basic carries a key for old clients."""
    with transaction(database) as db:
        reader = keys.make(db, "reader", ["read"])
    client.environ_base.pop("HTTP_AUTHORIZATION")
    assert client.get("/health").status_code == 200
    assert client.get("/tasks").status_code == 401
    assert client.get("/tasks", headers={"X-API-Key": "polar-wrong"}).status_code == 401
    assert client.get("/tasks", auth=("polar", reader)).status_code == 200
    answer = client.post("/rollout/task/submit", json=task_body(), headers={"X-API-Key": reader})
    assert (answer.status_code, answer.json["code"]) == (403, "forbidden")
