"""How much one key may have open, submits that are sent again, and thousands of queued sessions."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, func, select

from polar import keys, lanes
from polar.api import create_app
from polar.db import transaction
from polar.models import RolloutSession, Task
from polar.settings import Settings
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task_body, topology
from tests.integration.rig import free_port, process

AGAIN = {"Idempotency-Key": "first try"}


@contextmanager
def api(database_url: str, **settings: Any) -> Iterator[FlaskClient]:
    """The API in this process with these settings; no key is sent unless a request names one."""
    app = create_app(Settings(database_url=database_url, **settings), FakeDispatcher())
    with app.test_client() as client:
        yield client
    app.config["DATABASE"].dispose()


def key(database: Engine, name: str) -> dict[str, str]:
    """Headers with a new key."""
    with transaction(database) as db:
        return {"X-API-Key": keys.make(db, name)}


def submit(client: FlaskClient, task_id: str, headers: dict[str, str], **changes: Any) -> Any:
    return client.post("/rollout/task/submit", json=task_body(task_id=task_id, **changes), headers=headers)


def counted(database: Engine) -> tuple[int, int]:
    """Tasks and sessions that there are."""
    with transaction(database) as db:
        tasks = db.scalar(select(func.count()).select_from(Task)) or 0
        return tasks, db.scalar(select(func.count()).select_from(RolloutSession)) or 0


def test_open_tasks_of_a_key(database: Engine, database_url: str) -> None:
    """One more is a 429 with its figures; it is taken once a task has ended; other keys are not touched."""
    mine, other = key(database, "mine"), key(database, "other")
    with api(database_url, max_open_tasks=2) as client:
        assert [submit(client, name, mine).status_code for name in ("a", "b")] == [200, 200]
        refused = submit(client, "c", mine)
        assert (refused.status_code, refused.mimetype) == (429, "application/problem+json")
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.json["code"] == "too_many_open_tasks"
        assert (refused.json["limit"], refused.json["open"], refused.json["asked"]) == (2, 2, 1)
        assert "2 tasks running" in refused.json["detail"]
        assert submit(client, "c", other).status_code == 200
        client.delete("/rollout/task/a", headers=mine)
        assert submit(client, "d", mine).status_code == 200


def test_open_sessions_of_a_key(database: Engine, database_url: str) -> None:
    """Sessions count, and not tasks: what does not fit waits, what could never fit is a wrong request."""
    mine = key(database, "mine")
    with api(database_url, max_open_sessions=10) as client:
        assert submit(client, "a", mine, num_samples=7).status_code == 200
        refused = submit(client, "b", mine, num_samples=4)
        assert (refused.status_code, refused.json["code"]) == (429, "too_many_open_sessions")
        assert (refused.json["limit"], refused.json["open"], refused.json["asked"]) == (10, 7, 4)
        assert submit(client, "b", mine, num_samples=3).status_code == 200
        never = submit(client, "c", mine, num_samples=11)
        assert (never.status_code, never.json["errors"][0]["field"]) == (422, "num_samples")
    assert counted(database) == (2, 10)


def test_submits_at_once_cannot_pass_the_limit_together(database: Engine, database_url: str) -> None:
    """Twelve at the same time, room for five: five are taken."""
    mine = key(database, "mine")
    answers: list[int] = []
    with api(database_url, max_open_tasks=5, api_threads=12) as client:
        app = client.application

        def one(n: int) -> None:
            with app.test_client() as own:
                answers.append(submit(own, f"task-{n}", mine, num_samples=3).status_code)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [200] * 5 + [429] * 7
    assert counted(database) == (5, 15)


def test_no_limit_and_no_key(database: Engine, database_url: str) -> None:
    """0 is no limit; where no key is asked for, everybody together has one key's limits."""
    with api(database_url, auth="open", max_open_tasks=0, max_open_sessions=0) as client:
        assert {submit(client, f"a-{n}", {}).status_code for n in range(5)} == {200}
    with api(database_url, auth="open", max_open_tasks=6) as client:
        assert [submit(client, f"b-{n}", {}).status_code for n in range(2)] == [200, 429]


def test_a_recorded_session_counts(database: Engine, database_url: str) -> None:
    """POST /sessions is under the same limits."""
    mine = key(database, "mine")
    node, lane = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, lane)
    with api(database_url, max_open_sessions=1) as client:
        assert client.post("/sessions", headers=mine).status_code == 200
        assert client.post("/sessions", headers=mine).status_code == 429
        assert submit(client, "a", mine).status_code == 429


def test_callback_hosts_are_checked_at_submit(database: Engine, database_url: str) -> None:
    """A host that is not on the list is named, for tasks and for recorded sessions."""
    mine = key(database, "mine")
    with api(database_url, callback_allow="trainer") as client:
        for refused in (
            submit(client, "a", mine, callback_url="http://elsewhere/x"),
            client.post("/sessions", json={"callback_url": "http://elsewhere/x"}, headers=mine),
        ):
            assert (refused.status_code, refused.json["errors"][0]["field"]) == (422, "callback_url")
        assert submit(client, "a", mine, callback_url="http://trainer:9000/x").status_code == 200


def test_a_submit_that_is_sent_again(database: Engine, database_url: str) -> None:
    """With the same Idempotency-Key it finds its task, running or ended; without one a running name is a 409."""
    mine = key(database, "mine")
    with api(database_url, max_open_tasks=1) as client:
        assert submit(client, "a", mine | AGAIN).json == {"task_id": "a", "status": "running"}
        again = submit(client, "a", mine | AGAIN)
        assert (again.status_code, again.json) == (200, {"task_id": "a", "status": "running", "duplicate": True})
        client.delete("/rollout/task/a", headers=mine)
        assert submit(client, "a", mine | AGAIN).json == {"task_id": "a", "status": "cancelled", "duplicate": True}
        assert counted(database) == (1, 1)
        assert submit(client, "a", mine).json == {"task_id": "a", "status": "running"}
        assert submit(client, "a", mine).status_code == 429
    with api(database_url) as client:
        assert submit(client, "a", mine).status_code == 409
        assert submit(client, "a", mine | {"Idempotency-Key": "another"}).status_code == 409


def test_an_idempotency_key_belongs_to_one_body_and_one_key(database: Engine, database_url: str) -> None:
    """Another body is refused by name, another caller is another matter, and the header has a length."""
    mine, other = key(database, "mine"), key(database, "other")
    with api(database_url) as client:
        submit(client, "a", mine | AGAIN)
        refused = submit(client, "a", mine | AGAIN, instruction="something else")
        assert (refused.status_code, refused.json["code"]) == (422, "idempotency_key_reused")
        assert refused.json["errors"][0]["field"] == "Idempotency-Key"
        assert submit(client, "a", other | AGAIN).status_code == 409
        assert submit(client, "b", other | AGAIN).json == {"task_id": "b", "status": "running"}
        assert submit(client, "c", mine | {"Idempotency-Key": "x" * 256}).status_code == 422


def test_the_same_submit_many_times_at_once_is_one_task(database: Engine, database_url: str) -> None:
    """One is told that it made the task, the others that it was there."""
    mine = key(database, "mine")
    answers: list[Any] = []
    with api(database_url, api_threads=8, max_open_tasks=0, max_open_sessions=0) as client:
        app = client.application

        def one() -> None:
            with app.test_client() as own:
                answers.append(submit(own, "a", mine | AGAIN, num_samples=4).json)

        threads = [threading.Thread(target=one) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum("duplicate" in answer for answer in answers) == 7
    assert counted(database) == (1, 4)


@pytest.fixture
def served(database: Engine, database_url: str) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """The API under gunicorn, a client with a key, and the process that answers."""
    with transaction(database) as db:
        made = keys.make(db, "test")
    port = free_port()
    argv = [sys.executable, "-m", "gunicorn", "--no-control-socket", "workers.api:app", "-k", "gthread"]
    argv += ["--threads", "4", "-b", f"127.0.0.1:{port}", "--log-level", "error"]
    url = f"http://127.0.0.1:{port}"
    with process(argv, f"{url}/health", {"POLAR_DATABASE_URL": database_url}) as child:
        (worker,) = psutil.Process(child.pid).children()
        with httpx.Client(base_url=url, headers={"X-API-Key": made}, timeout=60) as client:
            yield client, worker


def test_thousands_of_sessions_queue_in_postgres(database: Engine, served: tuple[httpx.Client, psutil.Process]) -> None:
    """5,000 sessions wait in the database while the API's memory stays flat, and lists come in pages."""
    client, worker = served

    def tasks(numbers: range) -> None:
        for n in numbers:
            body = task_body(task_id=f"task-{n}", num_samples=100, instruction="do it " * 200)
            assert client.post("/rollout/task/submit", json=body).status_code == 200

    tasks(range(5))
    client.get("/sessions", params={"limit": 200})
    before = worker.memory_info().rss
    tasks(range(5, 45))
    body = task_body(task_id="wide", num_samples=500)
    assert client.post("/rollout/task/submit", json=body).status_code == 200
    assert counted(database) == (46, 5000)
    assert client.get("/rollout/status").json()["pipeline"]["pending_sessions"] == 5000
    seen: list[str] = []
    page: dict[str, Any] = {"next": -1}
    while page["next"] is not None:
        page = client.get("/tasks/wide/sessions", params={"limit": 150, "after": page["next"]}).json()
        assert len(page["sessions"]) <= 150
        seen += [row["session_id"] for row in page["sessions"]]
    assert len(set(seen)) == len(seen) == 500
    assert len(client.get("/tasks", params={"limit": 10}).json()["tasks"]) == 10
    assert len(client.get("/sessions", params={"limit": 200}).json()["sessions"]) == 200
    grown = worker.memory_info().rss - before
    assert grown < 24 << 20, f"the API grew by {grown >> 20} MiB"
