"""Fixtures of the proxy's tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine

from polar import keys
from polar.api import create_app
from polar.db import transaction
from polar.settings import Settings
from tests.fakes.dispatcher import FakeDispatcher
from tests.integration.rig import SCRIPTS, free_port, open_session, process, serve


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scripted engine."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPTS))
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def session_id(database: Engine, engine_url: str) -> str:
    """The session of most tests."""
    return open_session(database, engine_url)


@pytest.fixture
def proxy(database_url: str) -> Iterator[str]:
    """The proxy in this process."""
    with serve(database_url) as url:
        yield url


@pytest.fixture
def api(database_url: str, database: Engine) -> Iterator[FlaskClient]:
    """The REST API with a key of all scopes."""
    with transaction(database) as db:
        key = keys.make(db, "trainer")
    app = create_app(Settings(database_url=database_url), FakeDispatcher())
    with app.test_client() as made:
        made.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {key}"
        yield made
    app.config["DATABASE"].dispose()
