"""`polar.client` against a real API: submit, feed, run, through a server that goes away; both clients alike."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from polar import keys, lifecycle, queries
from polar.client import (
    AsyncClient,
    AuthError,
    BusyError,
    Client,
    ClientError,
    ConflictError,
    InvalidError,
    NotFoundError,
    ProtocolError,
    Retry,
    Task,
    UnreachableError,
)
from polar.db import connect, transaction
from polar.spec import TaskRequest
from tests.fakes.tasks import task_body
from tests.integration.rig import free_port, process

HASTY = Retry(unreachable_seconds=0.3, busy_seconds=0.3)


@contextmanager
def api(database_url: str, port: int, **settings: str) -> Iterator[str]:
    """The API under gunicorn."""
    argv = [sys.executable, "-m", "gunicorn", "--no-control-socket", "workers.api:app", "-k", "gthread"]
    argv += ["--threads", "8", "-b", f"127.0.0.1:{port}", "--log-level", "error", "--graceful-timeout", "1"]
    url = f"http://127.0.0.1:{port}"
    with process(argv, f"{url}/health", {"POLAR_DATABASE_URL": database_url, **settings}, seconds=90):
        yield url


@pytest.fixture(scope="module")
def place(postgres: str, template_database: str) -> Iterator[tuple[Engine, str, str]]:
    """One database with one API and one key for the tests of this file: starting an API is most of a test's time."""
    found = connect(postgres, pool_size=1)
    with found.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f'CREATE DATABASE client_test TEMPLATE "{template_database.rpartition("/")[2]}"'))
    found.dispose()
    database_url = postgres.rpartition("/")[0] + "/client_test"
    database = connect(database_url, pool_size=4)
    with transaction(database) as db:
        key = keys.make(db, "test")
    with api(database_url, free_port()) as url:
        yield database, url, key
    database.dispose()


@pytest.fixture
def database(place: tuple[Engine, str, str]) -> Engine:
    """Its database, with nothing in it."""
    with transaction(place[0]) as db:
        db.execute(text("TRUNCATE tasks, feed, consumers CASCADE"))
    return place[0]


@pytest.fixture
def database_url(database: Engine) -> str:
    """Of the same."""
    return database.url.render_as_string(hide_password=False)


@pytest.fixture
def url(place: tuple[Engine, str, str], database: Engine) -> str:
    """Of its API."""
    return place[1]


@pytest.fixture
def key(place: tuple[Engine, str, str]) -> str:
    """An API key."""
    return place[2]


def end(database: Engine, task_id: str) -> None:
    """End every session of a task."""
    with transaction(database) as db:
        lifecycle.cancel_task(db, task_id)


@contextmanager
def ender(database: Engine, delay: float = 0.02) -> Iterator[None]:
    """Somebody who ends sessions as they come, one at a time: what lanes are to a real run."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(delay):
            with transaction(database) as db:
                rows = queries.task_rows(db, state="running", harness=None, since=None, limit=50)
                for row in rows:
                    waiting = [each for each in queries.sessions_of(db, row["task"].id) if each.ended_at is None]
                    if waiting:
                        lifecycle.cancel(db, waiting[0])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def tasks(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [task_body(task_id=f"task-{number}", **changes) for number in range(count)]


def test_run_yields_every_session_once(database: Engine, url: str, key: str) -> None:
    """Sessions of many tasks come as they end; those of other clients do not, nor what ended before."""
    with Client(url, key) as client, ender(database):
        before = list(client.run(task_body(task_id="task-0", num_samples=2)))
        others = client.submit(task_body(task_id="other"))
        found = list(client.run(tasks(30, num_samples=3), concurrency=4, progress=True))
        client.wait(others.task_id)
        assert len({each.session_id for each in found}) == len(found) == 90
        assert {each.task_id for each in found} == {f"task-{number}" for number in range(30)}
        assert not {each.session_id for each in before} & {each.session_id for each in found}


def test_run_may_be_repeated_after_a_restart(database: Engine, url: str, key: str) -> None:
    """With keys of its own a run finds the tasks of an earlier one, ended or not, and starts none twice."""
    mine = tasks(4, num_samples=2)
    with Client(url, key) as client, ender(database):
        first = {each.session_id for each in client.run(mine[:2], idempotency_key=lambda task: task["task_id"])}
        again = {each.session_id for each in client.run(mine, idempotency_key=lambda task: task["task_id"])}
        assert first < again and len(again) == 8


def test_run_tells_what_a_submit_was_refused_for(database: Engine, url: str, key: str) -> None:
    """One wrong task ends the run with its field; a run that is left early leaves no thread behind."""
    with Client(url, key) as client, ender(database):
        wrong = [*tasks(2), task_body(task_id="wrong", num_samples=0)]
        with pytest.raises(InvalidError, match="num_samples") as caught:
            list(client.run(wrong))
        assert caught.value.status == 422 and caught.value.errors[0]["field"] == "num_samples"
        running = client.run(tasks(4, metadata={"group_id": "early"}, num_samples=2, instruction="more"), group="early")
        next(running)
        running.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("polar-")]


def test_results_go_on_through_a_restart(database: Engine, database_url: str, key: str) -> None:
    """A follower sees each session once, in order, though the API goes away and comes back."""
    port, seen = free_port(), []
    with api(database_url, port) as url:
        client = Client(url, key)
        for task in tasks(2, num_samples=3):
            client.submit(task)
        end(database, "task-0")
        following = client.results(follow=True, limit=2)
        seen += [next(following).cursor for _ in range(3)]
    back = threading.Thread(target=time.sleep, args=(0.5,))
    back.start()
    end(database, "task-1")
    more: list[str | None] = []
    reader = threading.Thread(target=lambda: more.extend(next(following).cursor for _ in range(3)))
    reader.start()
    back.join()
    with api(database_url, port):
        reader.join(60)
    assert [*seen, *more] == ["1", "2", "3", "4", "5", "6"]


def test_a_consumer_goes_on_where_it_acknowledged(database: Engine, url: str, key: str) -> None:
    """Reading moves nothing, acknowledging does; `rewind` moves back."""
    with Client(url, key) as client:
        client.submit(task_body(num_samples=4))
        end(database, "task-1")
        first, second, *_ = client.results(consumer="trainer", full=False)
        assert first.cursor == "1" and second.cursor is not None
        assert client.ack("trainer", second.cursor) == "2"
        assert [each.cursor for each in client.results(consumer="trainer")] == ["3", "4"]
        assert client.ack("trainer", "0", rewind=True) == "0"
        assert len(list(client.results(consumer="trainer", group="nobody's"))) == 0
        pages = list(client.batches(limit=3))
        assert [cursor for cursor, _ in pages] == ["3", "4"]
        assert pages[0][1].num_rows == 3


def test_sessions_and_tasks(database: Engine, url: str, key: str) -> None:
    """States, events, trajectories and lists are read; cancel may be repeated, wait gives up in time."""
    with Client(url, key) as client:
        assert not client.ready(), "no lane is alive"
        accepted = client.submit(task_body(num_samples=2), idempotency_key="once")
        assert client.submit(task_body(num_samples=2), idempotency_key="once").duplicate and not accepted.duplicate
        one, other = client.sessions("task-1")
        assert (one.stage, one.state) == ("prewarm", "queued")
        with pytest.raises(TimeoutError, match="it goes on"):
            client.wait("task-1", seconds=0.3)
        assert client.cancel_session(one.session_id).state == "cancelled"
        assert client.cancel("task-1").ended and client.cancel("task-1").completed_sessions == 2
        assert client.wait("task-1").results[0].task_id == "task-1"
        assert client.session(other.session_id).state == "cancelled"
        assert [each["move"] for each in client.events(other.session_id)][-1] == "cancel"
        assert client.trajectory(other.session_id).traces == []
        assert list(client.completions(other.session_id)) == []
        assert [each["task_id"] for each in client.tasks(limit=5)] == ["task-1"]
        assert client.request("GET", "/health")["status"] == "ok"


def test_the_policy_moves(url: str, key: str) -> None:
    """Version, bound and gate; what is not given stays, None takes the bound away."""
    with Client(url, key) as client:
        assert client.set_policy(3, name="p", max_staleness=2).version == 3
        assert (client.set_policy(4).max_staleness, client.policy().name) == (2, "p")
        assert client.set_policy(max_staleness=None).max_staleness is None
        assert client.pause(wait=5).gate == "drain"
        assert client.resume().gate == "open"


def test_errors_say_what_is_wrong(database: Engine, url: str, key: str) -> None:
    """Each kind of refusal has its class, with the problem document."""
    with Client(url, key, retry=HASTY) as client:
        with pytest.raises(NotFoundError):
            client.status("no/such task")
        client.submit(task_body())
        with pytest.raises(ConflictError) as caught:
            client.submit(task_body())
        assert caught.value.problem["status"] == 409 and caught.value.asked == "POST /rollout/task/submit"
        with pytest.raises(InvalidError, match="past the end of the feed"):
            list(client.results(after="99"))
    with Client(url, "wrong") as nobody, pytest.raises(AuthError, match="give the client a key"):
        nobody.tasks()
    with Client(f"http://127.0.0.1:{free_port()}", retry=HASTY) as nowhere:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="does not answer"):
            nowhere.tasks()
        assert 0.2 < time.monotonic() - began < 5


def test_a_full_house_is_waited_for(database: Engine, database_url: str, key: str) -> None:
    """A submit that does not fit is sent again until it does, or patience ends."""
    with api(database_url, free_port(), POLAR_MAX_OPEN_TASKS="2") as url:
        with Client(url, key, retry=HASTY) as hasty, pytest.raises(BusyError) as caught:
            list(hasty.submit_many(tasks(3)))
        assert caught.value.problem["limit"] == 2
        with Client(url, key) as client, ender(database, 0.2):
            more = [task_body(task_id=f"again-{number}") for number in range(6)]
            assert len(list(client.run(more))) == 6


def test_another_server_is_found_out() -> None:
    """What is not Polar is named, not misread."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()

        def answer() -> None:
            line, _ = door.accept()
            with line:
                line.recv(10_000)
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\nConnection: close\r\n\r\n<html></html>")

        threading.Thread(target=answer).start()
        said = "does not answer GET /tasks as Polar does"
        with Client(f"http://127.0.0.1:{door.getsockname()[1]}") as client, pytest.raises(ProtocolError, match=said):
            client.tasks()


def test_a_page_that_breaks_off_is_gone_on_with(database: Engine, url: str, key: str) -> None:
    """What came whole of a page is handed out once; the rest is asked for again."""
    client = Client(url, key)
    client.submit(task_body(num_samples=6))
    end(database, "task-1")
    whole = client._http.get("/rollout/results", headers={"Accept": "application/x-ndjson"}).content

    class Torn(httpx.BaseTransport):
        def __init__(self) -> None:
            self.inner = httpx.HTTPTransport()
            self.torn = False

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if not self.torn:
                self.torn = True
                return httpx.Response(200, content=_cut(whole), headers={"X-Polar-Next": "6"})
            return self.inner.handle_request(request)

    client._http = httpx.Client(base_url=url, headers=client._http.headers, transport=Torn())
    assert [each.cursor for each in client.results()] == ["1", "2", "3", "4", "5", "6"]


def _cut(whole: bytes) -> Iterator[bytes]:
    yield whole[: len(whole) // 2]
    raise httpx.ReadError("cut")


def test_the_asynchronous_client_does_the_same(database: Engine, url: str, key: str) -> None:
    """Every call, awaited; a run that is left early cancels its submits."""

    async def work() -> None:
        async with AsyncClient(url, key) as client:
            found = [each async for each in client.run(tasks(10, num_samples=2), concurrency=3)]
            assert len({each.session_id for each in found}) == 20
            running = client.run(tasks(3, instruction="more"))
            await anext(running)
            await running.aclose()
            (one, _) = [each async for each in client.sessions("task-9")]
            assert (await client.session(one.session_id)).state == "cancelled"
            assert (await client.cancel_session(one.session_id)).state == "cancelled"
            assert (await client.trajectory(one.session_id)).traces == []
            assert [each async for each in client.completions(one.session_id)] == []
            assert await client.events(one.session_id)
            assert (await client.wait("task-9")).ended and (await client.cancel("task-9")).ended
            page = [each.cursor async for each in client.results(task_id="task-9", full=False)]
            assert await client.ack("me", str(page[-1])) == page[-1]
            assert (await client.set_policy(5)).version == 5 and (await client.policy()).gate == "open"
            assert (await client.pause()).gate == "drain" and (await client.resume()).gate == "open"
            assert not await client.ready() and await client.tasks() and await client.request("GET", "/health")
            with pytest.raises(InvalidError):
                [each async for each in client.run([task_body(task_id="wrong", num_samples=0)])]
            with pytest.raises(ClientError):
                await client.status("nobody")

    with ender(database):
        asyncio.run(work())


def test_both_clients_offer_the_same() -> None:
    """Every public method of one is one of the other; `batches` needs files, not loops."""
    both = [{name for name in vars(each) if not name.startswith("_")} for each in (Client, AsyncClient)]
    assert both[0] - both[1] == {"batches"} and both[1] - both[0] == set()


def test_the_task_has_every_field_of_the_server() -> None:
    """The client's Task names what the server's TaskRequest takes."""
    assert set(Task.__annotations__) == set(TaskRequest.model_fields)


def test_the_client_needs_nothing_of_the_server() -> None:
    """Importing it loads httpx and orjson, and of Polar only itself."""
    heavy = "celery,flask,sqlalchemy,pydantic,numpy,psycopg,aiohttp,docker"
    code = (
        "import sys, polar.client\n"
        f"print(sorted(set('{heavy}'.split(',')) & set(sys.modules)))\n"
        "print([n for n in sys.modules if n.startswith('polar.') and not n.startswith('polar.client')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["[]", "[]"]
