"""A lane finds out by itself that its engine is down, says so everywhere, takes nothing, and goes on afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from polar import lifecycle, queries
from polar.api import wire
from polar.cli.checks import checks
from polar.db import transaction
from polar.embedded import free_port
from polar.leases import LeaseKeeper
from polar.settings import Settings
from polar.stages.runner import Lane
from polar.topology import EngineSpec, LaneSpec, NodeSpec
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task
from tests.integration.rig import process

pytestmark = pytest.mark.integration


@pytest.fixture
def port() -> int:
    """Where the lane's engine would be."""
    return free_port()


@contextmanager
def engine(port: int, script: Path) -> Iterator[None]:
    """Up while inside."""
    script.write_text(json.dumps({"scripts": [{"answers": [{"content": "yes"}]}]}))
    argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info"):
        yield


def shown(database: Engine, lane: Lane) -> tuple[str, str | None]:
    """What `GET /nodes` says of the only lane, which has just said that it is here."""
    lane.beat()
    with transaction(database) as db:
        (row,) = queries.nodes(db)
        (found,) = wire.node(row, queries.lanes(db), {})["lanes"]
    return found["state"], found["engine_error"]


def doctor(database: Engine) -> tuple[bool, str]:
    """What `polar doctor` says of it."""
    url = database.url.render_as_string(hide_password=False)
    (found,) = [each for each in checks(url, Settings()) if each.name == "lane a.gpu0"]
    return found.do is None, f"{found.found}; {found.do}" if found.do else found.found


def test_a_lane_finds_out_by_itself(
    database: Engine, port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two looks that find no engine, one line in the log, a lane that says so everywhere; and the way back."""
    spec = LaneSpec(name="a.gpu0", engine=EngineSpec(base_url=f"http://127.0.0.1:{port}"), max_execute=1)
    dispatcher = FakeDispatcher()
    node = NodeSpec(id="a", lanes=(spec,))
    lane = Lane(database, Settings(), node, spec, dispatcher, LeaseKeeper(database), "w")
    lane.beat()  # makes its row
    caplog.set_level("INFO", "polar")
    with engine(port, tmp_path / "script.json"):
        lane.look_at_engine()
    lane.look_at_engine()
    assert shown(database, lane) == ("pulling", None), "one miss may be a restart"
    lane.look_at_engine()
    lane.look_at_engine()
    state, error = shown(database, lane)
    assert state == "engine_down" and f":{port}" in str(error)
    assert caplog.text.count("lane takes nothing: its engine is down") == 1
    well, said = doctor(database)
    assert not well and "takes no sessions" in said and f":{port}" in said and "start the engine" in said
    with transaction(database) as db:
        waiting = queries.sessions_of(db, lifecycle.submit(db, task()).id)[0].id
    assert lane.look() == 0 and dispatcher.woken == []
    with engine(port, tmp_path / "script.json"):
        lane.look_at_engine()
    assert shown(database, lane) == ("pulling", None)
    assert caplog.text.count("engine is back") == 1
    assert [(waiting, "prewarm", "a.gpu0")] == dispatcher.woken
    assert doctor(database) == (True, "takes sessions on node a")
