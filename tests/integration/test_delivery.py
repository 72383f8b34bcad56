"""Webhooks against a real HTTP listener: owed until acknowledged."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from sqlalchemy import Engine, select, update

from polar import lifecycle
from polar.api import wire
from polar.db import transaction
from polar.delivery.callbacks import deliver_due
from polar.models import Delivery, now
from tests.fakes.tasks import task


class Listener(HTTPServer):
    """Answers with the next of `answers`, and keeps what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[int] = []
        self.came: list[tuple[dict[str, str], bytes]] = []


class Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came.append((dict(self.headers), body))
        self.send_response(self.server.answers.pop(0))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def listener() -> Iterator[Listener]:
    server = Listener()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def owe(database: Engine, url: str) -> None:
    with transaction(database) as db:
        lifecycle.submit(db, task(callback_url=url))
    with transaction(database) as db:
        lifecycle.cancel_task(db, "task-1")


def make_due(database: Engine) -> None:
    with transaction(database) as db:
        db.execute(update(Delivery).values(next_at=now() - timedelta(seconds=1)))


def test_a_callback_is_retried_until_it_is_taken(database: Engine, listener: Listener) -> None:
    """A 500 leaves it owed, a 200 acknowledges it, and after that nothing is posted any more."""
    listener.answers = [500, 200]
    owe(database, f"http://127.0.0.1:{listener.server_port}/done")
    assert [deliver_due(database, wire.task_result) for _ in range(2)] == [0, 0]
    make_due(database)
    assert deliver_due(database, wire.task_result) == 1
    make_due(database)
    assert deliver_due(database, wire.task_result) == 0
    assert len(listener.came) == 2
    with transaction(database) as db:
        (delivery,) = db.scalars(select(Delivery))
    assert (delivery.acknowledged, delivery.attempts) == (True, 2)


def test_a_callback_is_signed_and_carries_the_task_result(database: Engine, listener: Listener) -> None:
    """The body is the original's TaskResult; its signature is the HMAC of exactly these bytes."""
    listener.answers = [204]
    owe(database, f"http://127.0.0.1:{listener.server_port}/done")
    deliver_due(database, wire.task_result, "secret")
    ((headers, body),) = listener.came
    assert hmac.new(b"secret", body, hashlib.sha256).hexdigest() == headers["X-Polar-Signature"]
    assert {"task_id", "status", "results", "result_paths"} == json.loads(body).keys()


def test_nobody_listening_leaves_it_owed(database: Engine) -> None:
    """A refused connection is a reason, kept with the row."""
    owe(database, "http://127.0.0.1:9/done")
    assert deliver_due(database, wire.task_result) == 0
    with transaction(database) as db:
        (delivery,) = db.scalars(select(Delivery))
    assert delivery.ended_at is None and delivery.last_error is not None
