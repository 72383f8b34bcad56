"""Sessions that are opened for a harness elsewhere, as the REST API and the rows show them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from polar import keys, lanes
from polar.api import create_app
from polar.db import transaction
from polar.models import RolloutSession, now
from polar.placement import place
from polar.settings import Settings
from polar.sweep import sweep
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task_body, topology
from tests.integration.rig import client as openai_client
from tests.integration.rig import serve

pytestmark = pytest.mark.integration


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
def api(database_url: str, database: Engine, dispatcher: FakeDispatcher, engine_url: str) -> Iterator[FlaskClient]:
    """The REST API with one lane alive on the scripted engine."""
    node, lane = topology(engine_url, max_execute=1, ready_buffer=0).lane("gpu0")
    with transaction(database) as db:
        key = keys.make(db, "test")
        lanes.beat(db, node, lane)
    app = create_app(Settings(database_url=database_url), dispatcher)
    with app.test_client() as client:
        client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {key}"
        yield client
    app.config["DATABASE"].dispose()


def call(database_url: str, key: str) -> None:
    """One model call with this key."""
    with serve(database_url) as url:
        openai_client(url, key).chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])


def test_open_call_close(api: FlaskClient, database_url: str, dispatcher: FakeDispatcher) -> None:
    """A key that works from the first moment; closing queues the session to be reconstructed, once."""
    opened = api.post("/sessions", json={}).json
    assert opened["status"] == "RUNNING"
    call(database_url, opened["api_key"])
    where = f"/sessions/{opened['session_id']}"
    assert api.get(where).json["completion_count"] == 1
    assert api.post(f"{where}/close").json["status"] == "POST_RUN"
    assert api.post(f"{where}/close").json["status"] == "POST_RUN"
    assert dispatcher.woken == [(opened["session_id"], "reconstruct", "gpu0")]
    listed = api.get("/sessions", query_string={"task_id": opened["task_id"]}).json["sessions"]
    assert [row["session_id"] for row in listed] == [opened["session_id"]]


def test_nothing_recorded_is_a_failure(api: FlaskClient) -> None:
    """A session that is closed without a call ends as failed and says so."""
    opened = api.post("/sessions").json
    closed = api.post(f"/sessions/{opened['session_id']}/close").json
    assert closed["status"] == "ERROR"
    result = api.get(f"/sessions/{opened['session_id']}").json["result"]
    assert "no model call" in result["error"]


def test_one_that_is_never_closed_is_closed_when_its_time_is_up(
    api: FlaskClient, database: Engine, database_url: str, dispatcher: FakeDispatcher
) -> None:
    """What was recorded until then is built."""
    opened = api.post("/sessions", json={"timeout_seconds": 60}).json
    call(database_url, opened["api_key"])
    with Session(database) as db, db.begin():
        db.execute(update(RolloutSession).values(lease_until=now() - timedelta(seconds=1)))
    assert sweep(database, dispatcher)["freed"] == 1
    assert dispatcher.woken == [(opened["session_id"], "reconstruct", "gpu0")]
    assert api.get(f"/rollout/session/{opened['session_id']}").json["agent_exit"]["state"] == "timed_out"


def test_recordings_take_no_room_from_agents(api: FlaskClient, database: Engine) -> None:
    """A lane that records is as free for agents as before."""
    api.post("/sessions")
    api.post("/rollout/task/submit", json=task_body())
    with transaction(database) as db:
        assert len(place(db, "gpu0")) == 1


def test_dropping_cancels(api: FlaskClient) -> None:
    """DELETE ends the session; its key dies."""
    opened = api.post("/sessions").json
    assert api.delete(f"/sessions/{opened['session_id']}").json["status"] == "ERROR"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"agent": {"harness": "codex"}}, "agent"),
        ({"harness": "no_such"}, "agent.harness"),
        ({"builder": {"strategy": "no_such"}}, "builder.strategy"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_field_is_named(api: FlaskClient, body: dict[str, Any], field: str) -> None:
    """Each wrong body is a 422 that names the field."""
    answer = api.post("/sessions", json=body)
    assert answer.status_code == 422
    assert answer.json["errors"][0]["field"] == field


def test_a_task_cannot_name_it(api: FlaskClient) -> None:
    """A task whose harness nobody starts would wait for ever."""
    answer = api.post("/rollout/task/submit", json=task_body(agent={"harness": "external"}))
    assert (answer.status_code, answer.json["errors"][0]["field"]) == (422, "agent.harness")


def test_closing_a_session_that_polar_runs(api: FlaskClient) -> None:
    """Only a recording can be closed."""
    api.post("/rollout/task/submit", json=task_body())
    session_id = api.get("/tasks/task-1/sessions").json["sessions"][0]["session_id"]
    assert api.post(f"/sessions/{session_id}/close").status_code == 409


def test_no_lane(database_url: str, database: Engine, dispatcher: FakeDispatcher) -> None:
    """Without a lane that is alive there is nothing to record with, and nothing is kept."""
    app = create_app(Settings(database_url=database_url, auth="open"), dispatcher)
    answer = app.test_client().post("/sessions")
    assert (answer.status_code, answer.json["code"]) == (503, "no_lane")
    assert app.test_client().get("/sessions").json["sessions"] == []
    app.config["DATABASE"].dispose()
