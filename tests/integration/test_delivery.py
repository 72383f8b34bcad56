"""Webhooks against real HTTP receivers that fail, hang, redirect and come back: owed until acknowledged."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from polar import lifecycle, queries
from polar.api import wire
from polar.db import transaction
from polar.delivery import callbacks
from polar.delivery.callbacks import deliver_due, pause, sign
from polar.errors import SpecError
from polar.models import Delivery, Task, now
from tests.fakes.tasks import task
from tests.integration.rig import free_port, until

DOCS = Path(__file__).parents[2] / "docs" / "results.md"


class Receiver(ThreadingHTTPServer):
    """Answers with the next of `answers` (200 when there is none), and keeps what came; a float is a pause first."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answers: list[int | float] = []
        self.came: list[tuple[dict[str, str], bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/done"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came.append((dict(self.headers), body))
        answer = self.server.answers.pop(0) if self.server.answers else 200
        if isinstance(answer, float):
            time.sleep(answer)
            answer = 200
        self.send_response(answer)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.stop()


def owe(database: Engine, url: str, task_id: str = "task-1", **changes: Any) -> None:
    """A task that has ended and has a callback to make."""
    with transaction(database) as db:
        lifecycle.submit(db, task(task_id=task_id, callback_url=url, **changes))
    with transaction(database) as db:
        lifecycle.cancel_task(db, task_id)


def make_due(database: Engine) -> None:
    with transaction(database) as db:
        db.execute(update(Delivery).values(next_at=now() - timedelta(seconds=1)))


def deliver(database: Engine, **options: Any) -> int:
    return deliver_due(database, wire.callback_body, **options)


def deliveries(database: Engine) -> list[Delivery]:
    with transaction(database) as db:
        return list(db.scalars(select(Delivery).order_by(Delivery.created_at)))


def documented_verify() -> Callable[..., bool]:
    """The function that docs/results.md gives to receivers."""
    (source,) = re.findall(r"```python\n(import hashlib.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(source, names)
    verify: Callable[..., bool] = names["verify"]
    return verify


def test_a_callback_is_retried_until_it_is_taken(database: Engine, receiver: Receiver) -> None:
    """A 500 leaves it owed under the same delivery id, a 200 acknowledges it, and then nothing is posted any more."""
    receiver.answers = [500]
    owe(database, receiver.url)
    assert [deliver(database) for _ in range(2)] == [0, 0]
    make_due(database)
    assert deliver(database) == 1
    make_due(database)
    assert deliver(database) == 0
    assert len(receiver.came) == 2
    assert len({headers["X-Polar-Delivery"] for headers, _ in receiver.came}) == 1
    (delivery,) = deliveries(database)
    assert (delivery.acknowledged, delivery.attempts, delivery.last_error) == (True, 2, None)


def test_a_task_callback_is_the_originals(database: Engine, receiver: Receiver) -> None:
    """Without callback_events only the task is posted, with the original's TaskResult; without a secret, unsigned."""
    owe(database, receiver.url, num_samples=2)
    assert deliver(database) == 1
    ((headers, body),) = receiver.came
    assert json.loads(body).keys() == {"task_id", "status", "results", "result_paths"}
    assert headers["X-Polar-Event"] == "task"
    assert "X-Polar-Signature" not in headers


def test_session_callbacks(database: Engine, receiver: Receiver) -> None:
    """Each session's result is owed as it ends, the task's at the end, each under an id of its own."""
    with transaction(database) as db:
        row = lifecycle.submit(db, task(num_samples=3, callback_url=receiver.url, callback_events=["session", "task"]))
        ids = [each.id for each in queries.sessions_of(db, row.id)]
    with transaction(database) as db:
        lifecycle.cancel(db, queries.session(db, ids[0]))
    assert deliver(database) == 1
    assert [json.loads(body)["session_id"] for _, body in receiver.came] == [ids[0]]
    with transaction(database) as db:
        lifecycle.cancel_task(db, "task-1")
    assert deliver(database) == 3
    came = [(headers["X-Polar-Event"], json.loads(body)) for headers, body in receiver.came]
    assert sorted(body["session_id"] for event, body in came if event == "session") == sorted(ids)
    assert [len(body["results"]) for event, body in came if event == "task"] == [3]
    assert len({headers["X-Polar-Delivery"] for headers, _ in receiver.came}) == 4


def test_only_sessions_may_be_asked_for(database: Engine, receiver: Receiver) -> None:
    """callback_events is what is posted and nothing else; an unknown event is refused."""
    owe(database, receiver.url, num_samples=2, callback_events=["session"])
    assert deliver(database) == 2
    assert {headers["X-Polar-Event"] for headers, _ in receiver.came} == {"session"}
    with pytest.raises(SpecError, match="callback_events"):
        task(callback_events=["node"])


def test_the_documented_function_verifies(database: Engine, receiver: Receiver) -> None:
    """It takes what was posted, and refuses another body, secret or time, and what was recorded long ago."""
    verify = documented_verify()
    owe(database, receiver.url)
    deliver(database, secret="secret")
    ((headers, body),) = receiver.came
    header = headers["X-Polar-Signature"]
    assert re.fullmatch(r"t=\d+,v1=[0-9a-f]{64}", header)
    assert verify("secret", header, body)
    assert not verify("another", header, body)
    assert not verify("secret", header, body + b" ")
    moment = int(time.time())
    assert not verify("secret", header.replace("t=", "t=1"), body)
    assert not verify("secret", sign("secret", body, moment - 400), body)
    assert verify("secret", sign("secret", body, moment - 400), body, tolerance=1000)
    for nonsense in ("", "t=,v1=", "v1=abc", f"t={moment}", "t=x,v1=é"):
        assert not verify("secret", nonsense, body)


def test_a_receiver_that_hangs_holds_up_nobody_else(
    database: Engine, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own callbacks stay owed; those of others arrive meanwhile, also more than fit at once."""
    monkeypatch.setattr(callbacks, "ROUND_SECONDS", 2.0)
    slow = Receiver()
    slow.answers = [8.0] * 20
    for n in range(8):
        owe(database, slow.url, f"slow-{n}")
    for n in range(20):
        owe(database, receiver.url, f"quick-{n}")
    began = time.monotonic()
    thread = threading.Thread(target=deliver, args=(database,), kwargs={"timeout": 3.0})
    thread.start()
    until(lambda: len(receiver.came) == 20)
    assert time.monotonic() - began < 3.0
    thread.join()
    slow.stop()
    tried = [each for each in deliveries(database) if each.url == slow.url and each.attempts]
    assert [each.last_error for each in tried] == ["no answer within 3 s"] * callbacks.AT_ONCE_TO_ONE_URL
    assert [each.acknowledged for each in deliveries(database)] == [False] * 8 + [True] * 20


def test_one_round_at_a_time(database: Engine) -> None:
    """A second round in the same process returns at once, so that hanging receivers take one of beat's threads."""
    slow = Receiver()
    slow.answers = [1.0]
    owe(database, slow.url)
    first = threading.Thread(target=deliver, args=(database,))
    first.start()
    until(lambda: slow.came)
    began = time.monotonic()
    assert deliver(database) == 0
    assert time.monotonic() - began < 0.5
    first.join()
    slow.stop()
    assert [each.acknowledged for each in deliveries(database)] == [True]


def test_a_receiver_that_restarts_gets_everything(database: Engine) -> None:
    """While nobody listens it stays owed, with the reason; the receiver that comes back gets it once."""
    port = free_port()
    owe(database, f"http://127.0.0.1:{port}/done")
    assert deliver(database) == 0
    (delivery,) = deliveries(database)
    assert delivery.ended_at is None and "Connect" in str(delivery.last_error)
    back = Receiver(port)
    make_due(database)
    assert deliver(database) == 1
    make_due(database)
    assert deliver(database) == 0
    back.stop()
    assert [headers["X-Polar-Delivery"] for headers, _ in back.came] == [str(delivery.id)]


def test_a_sender_that_dies_leaves_it_owed(database: Engine, receiver: Receiver) -> None:
    """What was claimed and not noted is due again after the attempt's time, and is not lost."""
    owe(database, receiver.url)
    callbacks._Round(database, wire.callback_body, "", "", 3.0)._claim([])
    assert deliver(database) == 0
    (delivery,) = deliveries(database)
    assert now() < delivery.next_at < now() + timedelta(seconds=60)
    make_due(database)
    assert deliver(database) == 1


def test_redirects_are_not_followed(database: Engine, receiver: Receiver) -> None:
    """A 302 or 307 is no acknowledgement, and the place it names is not called."""
    receiver.answers = [302, 307]
    owe(database, receiver.url)
    for answer in (302, 307):
        assert deliver(database) == 0
        assert deliveries(database)[0].last_error == f"answered {answer}"
        make_due(database)
    assert len(receiver.came) == 2


def test_it_expires(database: Engine, receiver: Receiver) -> None:
    """After a day without acknowledgement it ends, not acknowledged, and is not tried again."""
    receiver.answers = [500]
    owe(database, receiver.url)
    with transaction(database) as db:
        db.execute(update(Delivery).values(created_at=now() - callbacks.EXPIRES))
    deliver(database)
    make_due(database)
    assert deliver(database) == 0
    (delivery,) = deliveries(database)
    assert (delivery.acknowledged, delivery.ended_at is not None, len(receiver.came)) == (False, True, 1)


def test_pauses_grow_and_differ() -> None:
    """They double up to five minutes, and no two in a row of many are the same."""
    for attempts, longest in ((1, 2.0), (4, 16.0), (9, 300.0), (5000, 300.0)):
        found = [pause(attempts).total_seconds() for _ in range(50)]
        assert longest / 2 <= min(found) < max(found) <= longest
        assert len(set(found)) > 40


@pytest.mark.parametrize(
    ("url", "allow", "taken"),
    [
        ("http://trainer:9000/x", "", True),
        ("http://trainer:9000/x", "other, trainer", True),
        ("http://TRAINER/x", "trainer", True),
        ("http://a.example.com/x", "*.example.com", True),
        ("http://example.com/x", "*.example.com", False),
        ("http://badexample.com/x", "*.example.com", False),
        ("http://trainer@evil/x", "trainer", False),
        ("http://trainer:80@evil/x", "trainer", False),
        ("http://evil/trainer", "trainer", False),
        ("http://evil#@trainer/", "trainer", False),
        ("http://trainer.evil/x", "trainer", False),
        ("http://", "", False),
        ("http://[::1]:9000/", "::1", True),
    ],
)
def test_the_allow_list(url: str, allow: str, taken: bool) -> None:
    """Hosts are compared whole, as the HTTP client reads them; the rest of a URL counts for nothing."""
    if taken:
        callbacks.check_url(url, allow)
    else:
        with pytest.raises(SpecError, match="callback_url"):
            callbacks.check_url(url, allow)


def test_the_allow_list_holds_at_delivery_too(database: Engine, receiver: Receiver) -> None:
    """A host that was allowed at submit and is not any more is not called."""
    owe(database, receiver.url)
    assert deliver(database, allow="trainer.internal") == 0
    assert receiver.came == []
    assert "POLAR_CALLBACK_ALLOW" in str(deliveries(database)[0].last_error)


def test_a_result_that_cannot_be_made_stops_nobody(database: Engine, receiver: Receiver) -> None:
    """Its delivery says so and stays owed; the next one is posted."""
    owe(database, receiver.url, "broken")
    owe(database, receiver.url, "good")

    def render(db: Any, delivery: Delivery) -> dict[str, Any]:
        if db.get_one(Task, delivery.task_pk).task_id == "broken":
            raise KeyError("gone")
        return wire.callback_body(db, delivery)

    assert deliver_due(database, render) == 1
    broken, good = deliveries(database)
    assert (broken.acknowledged, good.acknowledged) == (False, True)
    assert broken.last_error == "its body could not be made: KeyError"
