"""The pages over a real database: a browser that is logged in, and rows as a run leaves them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import Engine
from werkzeug.test import TestResponse

from polar import keys
from polar.api import create_app
from polar.db import transaction
from polar.settings import Settings
from tests.admin.rows import lane_is_there, open_task, run
from tests.fakes.dispatcher import FakeDispatcher


class Browser:
    """What a browser without JavaScript does: follow links, and send the forms that pages have."""

    def __init__(self, client: FlaskClient) -> None:
        self.client = client

    def get(self, path: str, **options: Any) -> TestResponse:
        """Open a page."""
        return self.client.get(path, **options)

    def text(self, path: str) -> str:
        """A page that must open."""
        answer = self.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[-400:])
        return answer.text

    def token(self, path: str) -> str:
        """The token of the forms on a page."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.text(path))
        assert found
        return found[1]

    def send(self, path: str, form: str | None = None, **fields: Any) -> TestResponse:
        """Send the form of a page to where it says, as the page itself would."""
        fields = {"csrf": self.token(form or path), **fields}
        return self.client.post(path, data=fields, headers={"Sec-Fetch-Site": "same-origin"})

    def log_in(self, key: str, following: str = "") -> TestResponse:
        """Give a key to the login form."""
        return self.send("/admin/login", key=key, next=following)


@pytest.fixture
def app(database_url: str, tmp_path: Path) -> Iterator[Flask]:
    """The API with its pages."""
    app = create_app(Settings(database_url=database_url, home=str(tmp_path), pages_secret="test"), FakeDispatcher())
    yield app
    app.config["DATABASE"].dispose()


def key_with(database: Engine, *scopes: str) -> str:
    """A new key with these scopes."""
    with transaction(database) as db:
        return keys.make(db, f"key of {' and '.join(scopes)}", scopes)


@pytest.fixture
def stranger(app: Flask) -> Browser:
    """A browser that nobody has logged in with."""
    return Browser(app.test_client())


@pytest.fixture
def browser(app: Flask, database: Engine) -> Browser:
    """A browser that is logged in with every scope."""
    found = Browser(app.test_client())
    assert found.log_in(key_with(database, "read", "submit", "admin")).status_code == 303
    return found


@pytest.fixture
def story(database: Engine) -> dict[str, str]:
    """One session that completed and one that waits: names by which pages are opened."""
    lane_is_there(database)
    ended, waiting = open_task(database, samples=2)
    calls = run(database, ended)
    return {"task": "task-1", "session": ended, "waiting": waiting, "completion": calls[1], "root": calls[0]}
