"""No field of a task reaches a shell of the node: commands run in the runtime, and all else is data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar import lanes, lifecycle
from polar.api import create_app
from polar.db import transaction
from polar.errors import SpecError
from polar.harnesses import HARNESSES
from polar.leases import LeaseKeeper
from polar.lifecycle import STAGES
from polar.models import RolloutSession
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.settings import Settings
from polar.spec import parse_task
from polar.stages.runner import Lane
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task_body, topology

pytestmark = pytest.mark.integration
reason = BubblewrapRuntime.unavailable()
needs_bubblewrap = pytest.mark.skipif(reason is not None, reason=reason or "")
SAY = "printf '%s\\n' {{instruction}} {{model}} > said"
FIELDS = [
    "instruction",
    "agent.model_name",
    "agent.env.X",
    "agent.custom_shell.cwd",
    "agent.custom_shell.env.X",
    "runtime.env.X",
    "runtime.workdir",
    "runtime.prepare.0.cwd",
    "runtime.prepare.0.env.X",
    "runtime.prepare.1.source",
    "runtime.prepare.1.target",
    "evaluator.env.X",
    "evaluator.config.cwd",
    "evaluator.config.reward_file",
    "builder.strategy",
    "evaluator.strategy",
    "metadata.x",
    "lanes.0",
    "callback_url",
    "task_id",
]


def evil(file: Path) -> str:
    """What makes this file in whatever shell reads it, quoted or not."""
    do = f"touch {file}"
    return f"x'; {do}; '$({do})`{do}`\"; {do}; \"$({do}) | {do} && {do}"


def whole_task(backend: str, source: Path) -> dict[str, Any]:
    """A task that uses every field."""
    return task_body(
        agent={"harness": "shell", "custom_shell": {"command": SAY, "env": {}}, "model_name": "m", "env": {}},
        runtime={
            "backend": backend,
            "env": {},
            "prepare": [
                {"type": "exec", "command": "true", "env": {}},
                {"type": "upload_file", "source": str(source), "target": "given"},
            ],
        },
        builder={"strategy": "per_request"},
        evaluator={"strategy": "command", "config": {"command": "true"}, "env": {}},
        metadata={},
        lanes=["gpu0"],
        timeout_seconds=30,
    )


def put(body: dict[str, Any], path: str, value: str) -> dict[str, Any]:
    """The task with this field set."""
    body = copy.deepcopy(body)
    *parents, name = path.split(".")
    place: Any = body
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[int(name) if isinstance(place, list) else name] = value
    return body


def run(database: Engine, home: Path, body: dict[str, Any]) -> None:
    """Take the session through as many stages as it gets to."""
    node, spec = topology().lane("gpu0")
    url = database.url.render_as_string(hide_password=False)
    lane = Lane(
        database, Settings(database_url=url, home=str(home)), node, spec, FakeDispatcher(), LeaseKeeper(database), "w"
    )
    with transaction(database) as db:
        lanes.beat(db, node, spec)
        lifecycle.submit(db, parse_task(body))
    lane.look()
    with Session(database) as db:
        session_id = db.query(RolloutSession).one().id
    for stage in STAGES:
        if not lane.run(session_id, stage):
            return


@needs_bubblewrap
@pytest.mark.parametrize("field", FIELDS)
def test_no_field_is_read_by_a_shell_of_the_node(database: Engine, tmp_path: Path, field: str) -> None:
    """Quotes, substitutions and separators in any field make nothing on the node, whether the task is refused, fails
    or runs."""
    pwned, source = tmp_path / "pwned", tmp_path / "source"
    source.write_text("x")
    body = put(whole_task("bubblewrap", source), field, evil(pwned))
    try:
        run(database, tmp_path / "home", body)
    except SpecError:
        assert field in ("task_id", "callback_url", "evaluator.strategy", "builder.strategy")
    assert not pwned.exists()


@pytest.mark.parametrize("field", ["agent.custom_shell.command", "runtime.prepare.0.command"])
@pytest.mark.parametrize("backend", ["local", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_a_command_is_read_in_the_runtime(database: Engine, tmp_path: Path, field: str, backend: str) -> None:
    """What is meant to be a command runs, and where the runtime is: a sandbox shows it nothing of the node. The
    `local` runtime is the node, which also shows that these words would do harm where a shell read them."""
    pwned, source = tmp_path / "pwned", tmp_path / "source"
    source.write_text("x")
    run(database, tmp_path / "home", put(whole_task(backend, source), field, evil(pwned)))
    assert pwned.exists() == (backend == "local")


@pytest.mark.parametrize("field", ["instruction", "agent.model_name"])
def test_a_placeholder_is_one_word(database: Engine, tmp_path: Path, field: str) -> None:
    """What replaces a placeholder in a command of the `local` runtime, which isolates nothing, is not read as one."""
    pwned, source = tmp_path / "pwned", tmp_path / "source"
    source.write_text("x")
    run(database, tmp_path / "home", put(whole_task("local", source), field, evil(pwned)))
    assert not pwned.exists()


@pytest.fixture
def api(database_url: str, database: Engine) -> FlaskClient:
    """Without keys."""
    return create_app(Settings(database_url=database_url, auth="open"), FakeDispatcher()).test_client()


@pytest.mark.parametrize("name", sorted(set(HARNESSES) - {"shell"}))
@pytest.mark.parametrize("version", ["1.0; touch /tmp/x", "--index-url=http://evil/", "1 -e .", "@ file:///x", "../x"])
def test_an_installer_is_given_versions_only(api: FlaskClient, name: str, version: str) -> None:
    """What programs are installed on the node by is no place for options, paths or commands."""
    agent = {"harness": name, "settings": {"version": version}}
    answer = api.post("/rollout/task/submit", json=task_body(agent=agent))
    assert answer.status_code == 422, (name, answer.text)
