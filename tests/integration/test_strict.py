"""Strict tasks end to end: what is not exact is kept, shown with its reason, and not handed out for training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from flask.testing import FlaskClient
from sqlalchemy import Engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from polar import keys, lanes
from polar.api import create_app
from polar.cli.client import show_withheld
from polar.db import transaction
from polar.leases import LeaseKeeper
from polar.lifecycle import Stage
from polar.settings import Settings
from polar.stages.runner import Lane
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import topology
from tests.integration.rig import client as openai_client
from tests.integration.rig import free_port, serve, until

pytestmark = pytest.mark.integration


def forgetful(engine_url: str) -> Starlette:
    """An engine that does not say how many ids it was given, as one behind a router that drops fields."""

    async def forward(request: Request) -> JSONResponse:
        async with httpx.AsyncClient(base_url=engine_url, timeout=30) as http:
            answer = await http.request(request.method, request.url.path, content=await request.body())
        body = answer.json()
        if isinstance(body, dict) and "meta_info" in body:
            del body["meta_info"]["prompt_tokens"]
        return JSONResponse(body, answer.status_code)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


@pytest.fixture
def forgetful_url(engine_url: str) -> Iterator[str]:
    """The same scripted engine, behind it."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(forgetful(engine_url), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def ended(database: Engine, database_url: str, home: Path, engine_url: str, **body: Any) -> dict[str, Any]:
    """A recorded session of one call, through the real stages; the task as the REST API then shows it."""
    node, lane_spec = topology(engine_url, max_execute=1, ready_buffer=0).lane("gpu0")
    dispatcher, settings = FakeDispatcher(), Settings(database_url=database_url, home=str(home))
    with transaction(database) as db:
        key = keys.make(db, "test")
        lanes.beat(db, node, lane_spec)
    app = create_app(settings, dispatcher)
    try:
        api: FlaskClient
        with app.test_client() as api:
            api.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {key}"
            opened: Any = api.post("/sessions", json=body).json
            with serve(database_url) as url:
                openai_client(url, opened["api_key"]).chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hello"}]
                )
            api.post(f"/sessions/{opened['session_id']}/close")
            lane = Lane(database, settings, node, lane_spec, dispatcher, LeaseKeeper(database), "worker-1")
            assert lane.run(opened["session_id"], Stage.RECONSTRUCT)
            assert lane.run(opened["session_id"], Stage.EVALUATE)
            shown: dict[str, Any] = api.get(f"/rollout/task/{opened['task_id']}").json
            return shown
    finally:
        app.config["DATABASE"].dispose()


def test_a_strict_task_quarantines_what_is_not_exact(
    database: Engine, database_url: str, tmp_path: Path, forgetful_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is there with its tokens, and API and command line say why it is not for training."""
    task = ended(database, database_url, tmp_path, forgetful_url, strict=True)
    (trace,) = task["results"][0]["trajectory"]["traces"]
    assert (trace["fidelity"], trace["trainable"], trace["weight"]) == ("unverified", False, 0.0)
    reason = "the task is strict and the trace is unverified"
    assert trace["decision"] == {"rule": "quarantined", "reason": reason}
    assert sum(trace["loss_mask"]) > 0
    show_withheld(task)
    assert capsys.readouterr().out == f"not for training: 1 trace, quarantined: {reason}\n"


def test_a_task_that_is_not_strict_is_told(
    database: Engine, database_url: str, tmp_path: Path, forgetful_url: str
) -> None:
    """The same trace may train there, and still says that nobody vouches for its prompt."""
    task = ended(database, database_url, tmp_path, forgetful_url)
    (trace,) = task["results"][0]["trajectory"]["traces"]
    assert (trace["fidelity"], trace["trainable"], trace["decision"]["rule"]) == ("unverified", True, "unevaluated")


def test_a_strict_task_hands_out_what_is_exact(
    database: Engine, database_url: str, tmp_path: Path, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that says what it was given gives an exact trace, which trains, and nothing is withheld."""
    task = ended(database, database_url, tmp_path, engine_url, strict=True)
    (trace,) = task["results"][0]["trajectory"]["traces"]
    assert (trace["fidelity"], trace["trainable"]) == ("exact", True)
    show_withheld(task)
    assert capsys.readouterr().out == ""
