"""Attempts to break what docs/security.md promises, over real HTTP and on real Postgres."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
import zstandard
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import Engine, text

from polar import keys
from polar.api import create_app
from polar.api.auth import OPEN_PATHS
from polar.bodies import DIFFERENCE, MARK
from polar.db import transaction
from polar.models import ApiKey, now
from polar.proxy.limits import Limits
from polar.settings import Settings
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task_body
from tests.integration.rig import KEY, client, completions, free_port, open_session, process, serve, until
from workers.serving.patience import Worker

USER = {"role": "user", "content": "hello"}
ADMIN = [
    ("DELETE", "/nodes/x"),
    ("POST", "/nodes/x/resume"),
    ("PUT", "/rollout/policy"),
    ("POST", "/rollout/policy/push"),
    ("POST", "/rollout/pause"),
    ("POST", "/rollout/resume"),
]


class HurriedWorker(Worker):
    """As the API's, with less patience."""

    HEAD_SECONDS = 1.0
    BODY_SECONDS = 1.0


@pytest.fixture
def app(database_url: str, database: Engine) -> Iterator[Flask]:
    app = create_app(Settings(database_url=database_url, max_body_mb=1), FakeDispatcher())
    yield app
    app.config["DATABASE"].dispose()


@pytest.fixture
def api(app: Flask, database: Engine) -> Iterator[FlaskClient]:
    """With a key of every scope."""
    with app.test_client() as api:
        api.environ_base["HTTP_X_API_KEY"] = made(database)
        yield api


def made(database: Engine, *scopes: str) -> str:
    with transaction(database) as db:
        return keys.make(db, "test", scopes or keys.SCOPES)


def everything(database: Engine) -> dict[str, bytes]:
    """All that the database holds, by table and column; what is compressed is read, and differences in their parts."""
    found: dict[str, bytes] = {}
    columns = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
    with database.connect() as db:
        for table, column in db.execute(text(columns)).all():
            values = db.execute(text(f'SELECT "{column}" FROM "{table}"')).scalars()
            found[f"{table}.{column}"] = b"\n".join(readable(each) for each in values)
    return found


def readable(value: Any) -> bytes:
    if not isinstance(value, (bytes, memoryview)):
        return orjson.dumps(value, default=str)
    data = bytes(value)
    packed = data[DIFFERENCE.size :] if data[:1] == bytes([MARK]) else data
    try:
        return zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError:
        return data


def holding(database: Engine, secret: str) -> list[str]:
    """The columns in which a secret stands."""
    return [name for name, data in everything(database).items() if secret.encode() in data]


# Keys


def test_every_route_asks_for_its_scope(app: Flask, database: Engine) -> None:
    """Each route of the API, with each method: 401 without a key, 403 with every scope but the one that it needs."""
    without = {scope: made(database, *(s for s in keys.SCOPES if s != scope)) for scope in keys.SCOPES}
    tried = 0
    with app.test_client() as api:
        for rule in app.url_map.iter_rules():
            if rule.endpoint.startswith("admin."):
                continue  # the pages have a login of their own: tests/admin/test_login.py
            path = rule.rule
            for name in rule.arguments:
                path = path.replace(f"<path:{name}>", "x").replace(f"<{name}>", "x")
            for method in (rule.methods or set()) - {"OPTIONS"}:
                if path in OPEN_PATHS:
                    continue
                needed = "read" if method in ("GET", "HEAD") else "admin" if (method, path) in ADMIN else "submit"
                assert api.open(path, method=method).status_code == 401, (method, path)
                refused = api.open(path, method=method, headers={"X-API-Key": without[needed]})
                assert refused.status_code == 403, (method, path)
                tried += 1
    assert tried > 25


def test_a_revoked_key_is_dead_at_once(api: FlaskClient, database: Engine) -> None:
    """Nothing about keys is remembered between requests."""
    assert api.get("/tasks").status_code == 200
    with transaction(database) as db:
        db.query(ApiKey).update({"revoked_at": now()})
    assert api.get("/tasks").status_code == 401


def test_a_session_key_is_no_api_key_and_the_reverse(app: Flask, database: Engine, proxy: str, session_id: str) -> None:
    """Neither opens the other's door, in whichever header it travels."""
    with app.test_client() as api:
        for headers in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            assert api.get("/tasks", headers=headers).status_code == 401
        assert api.get("/tasks", auth=("polar", KEY)).status_code == 401
    rest = made(database)
    body = {"model": "m", "messages": [USER]}
    for headers in ({"api-key": rest}, {"Authorization": f"Bearer {rest}"}, {"x-api-key": rest}):
        assert httpx.post(f"{proxy}/v1/chat/completions", json=body, headers=headers).status_code == 401
    assert httpx.post(f"{proxy}/s/{rest}/v1/chat/completions", json=body).status_code == 401
    assert completions(database) == []


def test_the_hash_of_a_key_opens_nothing(app: Flask, database: Engine, proxy: str, session_id: str) -> None:
    """Who reads the tables has no key: the stored hash is not taken for one."""
    made(database)
    with database.connect() as db:
        api_hash = db.execute(text("SELECT encode(key_hash, 'hex') FROM api_keys")).scalar_one()
        session_hash = db.execute(text("SELECT encode(key_hash, 'hex') FROM sessions")).scalar_one()
    with app.test_client() as api:
        assert api.get("/tasks", headers={"X-API-Key": api_hash}).status_code == 401
    assert httpx.get(f"{proxy}/v1/models", headers={"api-key": session_hash}).status_code == 401


def test_a_session_sees_only_its_own_answers(database: Engine, proxy: str, engine_url: str) -> None:
    """Another session's stored answer cannot be read, continued or deleted by its id."""
    open_session(database, engine_url)
    mine = client(proxy).responses.create(model="m", input="hello", store=True)
    other = "another-session-key"
    with database.begin() as db:
        db.execute(text("UPDATE sessions SET key_hash = NULL, state = 'completed'"))
        copied = "id, task_pk, number, stage, state, lane, attempt, execute_attempt, key_hash"
        db.execute(
            text(
                f"INSERT INTO sessions ({copied}, priority, stage_attempts, queued_at, runtimes, turns, "
                "sampled_tokens, timing, created_at) SELECT 'ses-other', task_pk, 1, 'execute', 'running', lane, "
                f"1, 1, sha256('{other}'::bytea), 0, 1, now(), '{{}}', 0, 0, '{{}}', now() FROM sessions"
            )
        )
    headers = {"Authorization": f"Bearer {other}"}
    assert httpx.get(f"{proxy}/v1/models", headers=headers).status_code == 200
    assert httpx.get(f"{proxy}/v1/responses/{mine.id}", headers=headers).status_code == 404
    assert httpx.delete(f"{proxy}/v1/responses/{mine.id}", headers=headers).status_code == 404
    body = {"model": "m", "input": "go on", "previous_response_id": mine.id}
    assert httpx.post(f"{proxy}/v1/responses", json=body, headers=headers).status_code in (400, 404)
    assert completions(database)[0].flags == []


# What leaks


def test_a_session_key_is_nowhere(
    database: Engine, proxy: str, session_id: str, api: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A harness that puts its key into every field it has: no column, no answer of the API and no log line has it."""
    caplog.set_level("DEBUG")
    said = f"I am {KEY}"
    body = {
        "model": f"gpt-{KEY}",
        "messages": [{"role": "system", "content": said}, {"role": "user", "content": said, "name": KEY}],
        "stop": [KEY],
        "user": KEY,
        "metadata": {KEY: KEY},
        "tools": [{"type": "function", "function": {"name": "look", "description": said, "parameters": {}}}],
    }
    for place in ("", f"/s/{KEY}"):
        url = f"{proxy}{place}/v1/chat/completions"
        assert httpx.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        bad = httpx.post(url, json={**body, "messages": said}, headers={"Authorization": f"Bearer {KEY}"})
        assert bad.status_code == 400
    for path in (f"/s/{KEY}/nowhere", f"/s/{KEY}/v1/embeddings", f"/s/{KEY}/v1/models/x/y"):
        assert KEY not in httpx.post(f"{proxy}{path}", json={}).text
    client(proxy, max_retries=0).responses.create(model="m", input=said, instructions=said, user=KEY)
    assert len(completions(database)) >= 2
    assert holding(database, KEY) == []
    for path in ("", "/events", "/completions", "/trajectory"):
        assert KEY not in api.get(f"/rollout/session/{session_id}{path}").text
    # Requests that this test's own client sends are logged by that client.
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("polar", "uvicorn"))]
    assert [line for line in ours if KEY in line] == []


def test_the_search_for_secrets_finds_one(database: Engine, proxy: str, session_id: str) -> None:
    """The search that the test before this relies on reads compressed bodies, and differences between them."""
    for word in ("xylophone", "zeppelin"):
        messages: Any = [USER, {"role": "assistant", "content": "x" * 300}, {"role": "user", "content": word}]
        client(proxy).chat.completions.create(model="m", messages=messages)
        assert "completions.request" in holding(database, word)


def test_an_api_key_is_not_stored(api: FlaskClient, database: Engine) -> None:
    """Keys of the REST API stand nowhere in the database and in no answer, wrong ones included."""
    rest = api.environ_base["HTTP_X_API_KEY"]
    api.post("/rollout/task/submit", json=task_body())
    assert holding(database, rest) == []
    wrong = api.get("/tasks", headers={"X-API-Key": "polar-wrong"})
    assert (wrong.status_code, "polar-wrong" in wrong.text) == (401, False)
    for path in ("/nodes", "/rollout/status", "/rollout/task/task-1", "/openapi.json", "/metrics"):
        assert rest not in api.get(path).text


# Names, paths and bodies


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "a%00b", "%0d%0aX-A:b", "%ff", "x" * 9000]
)
@pytest.mark.parametrize(
    "path", ["/rollout/task/{}", "/rollout/session/{}", "/rollout/media/{}", "/tasks/{}/sessions", "/nodes/{}"]
)
def test_no_name_leads_anywhere(api: FlaskClient, path: str, name: str) -> None:
    """Names in paths are names: what is none is refused with a reason, in a body of JSON and without new headers."""
    answer = api.get(path.format(name))
    assert answer.status_code in (404, 422), answer.text
    assert answer.mimetype == "application/problem+json"
    assert "X-A" not in answer.headers


@pytest.mark.parametrize("task_id", ["..", "../x", "a/b", "a\0b", "a\nb", "", "x" * 200, ".hidden"])
def test_a_task_cannot_be_called_a_path(api: FlaskClient, task_id: str) -> None:
    """Names of tasks are letters, digits and a few signs."""
    assert api.post("/rollout/task/submit", json=task_body(task_id=task_id)).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"metadata":' + b'{"a":' * 300 + b"1" + b"}" * 301,
        b'{"task_id": "a", "instruction": "\\u0000", "agent": {"harness": "claude_code"}}',
        b'{"task_id": "a", "instruction": "\\ud800", "agent": {"harness": "claude_code"}}',
        b'{"num_samples": 1e999}',
        b'{"num_samples": ' + b"9" * 100_000 + b"}",
        b'{"task_id": NaN}',
        b"\xff\xfe{}",
    ],
)
def test_a_hostile_body_is_a_422(api: FlaskClient, body: bytes) -> None:
    """Nesting, NUL, half characters, huge numbers: refused in words, and the API goes on."""
    answer = api.post("/rollout/task/submit", data=body)
    assert answer.status_code == 422, answer.text
    assert api.get("/tasks").json == {"tasks": []}


def test_what_is_accepted_can_be_shown(api: FlaskClient) -> None:
    """The deepest metadata that is taken comes back; a task that could never be read would break everybody's feed."""
    deep: Any = 1
    for _ in range(95):
        deep = {"a": deep}
    assert api.post("/rollout/task/submit", json=task_body(metadata={"deep": deep, "big": 2**63})).status_code == 200
    api.delete("/rollout/task/task-1")
    (result,) = orjson.loads(api.get("/rollout/results").data)["results"]
    assert result["trajectory"]["metadata"]["task_metadata"]["deep"] == deep


def test_the_last_of_two_equal_names_counts(api: FlaskClient) -> None:
    """There is one reader, so no check sees another value than the one that is used."""
    body = orjson.dumps(task_body()).replace(b'"task-1"', b'"../x", "task_id": "task-1"')
    assert api.post("/rollout/task/submit", data=body).json["task_id"] == "task-1"


@pytest.mark.parametrize("query", ["after=1e30", "after=99999999999999999999", "limit=1e30", "limit=nan", "after=x"])
def test_hostile_numbers_are_refused(api: FlaskClient, query: str) -> None:
    """Numbers that no column holds are a 422 of the client's, not a fault of ours."""
    api.post("/rollout/task/submit", json=task_body())
    assert api.get(f"/tasks/task-1/sessions?{query}").status_code == 422
    assert api.get("/tasks?since=1e300").status_code == 422


def test_too_large_a_body(api: FlaskClient) -> None:
    """A body over the limit is refused, with its length declared or not."""
    assert api.post("/rollout/task/submit", data=b" " * (2 << 20)).status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"model": "m", "messages": ' + b"[" * 100_000,
        b'{"model": "m", "x": ' + b"9" * 100_000 + b', "messages": []}',
        b'{"model": "m", "messages": [], "max_tokens": 1e999}',
        b"\xff\xfe",
    ],
)
def test_a_hostile_call_is_a_400(proxy: str, session_id: str, body: bytes) -> None:
    """The proxy refuses it, so that no harness tries it again, and answers the next call."""
    headers = {"api-key": KEY}
    assert httpx.post(f"{proxy}/v1/chat/completions", content=body, headers=headers).status_code == 400
    assert httpx.get(f"{proxy}/v1/models", headers=headers).status_code == 200


def test_a_picture_is_not_a_page(database: Engine, proxy: str, session_id: str, api: FlaskClient) -> None:
    """A harness's picture that says it is a web page is served as bytes that no browser runs."""
    url = "data:text/html;base64,PHNjcmlwdD4="
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    httpx.post(f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY})
    with database.connect() as db:
        digests = db.execute(text("SELECT digest FROM media")).scalars().all()
    for digest in digests:
        answer = api.get(f"/rollout/media/{digest}")
        assert (answer.mimetype, answer.headers["X-Content-Type-Options"]) == ("application/octet-stream", "nosniff")
    assert len(digests) == 1


@pytest.mark.parametrize("url", ["file:///etc/passwd", "gopher://h/", "http://", "http:///x", "//h/", "\r\nhttp://h/"])
def test_a_callback_goes_to_a_web_address(api: FlaskClient, url: str) -> None:
    """What is no http address with a host is refused when it is asked for."""
    assert api.post("/rollout/task/submit", json=task_body(callback_url=url)).status_code == 422


# Slow clients


def drip(port: int, opening: bytes, stop: threading.Event, cut: list[float]) -> None:
    """A client that sends a byte now and then until it is hung up on; how long that took."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(0.2)
        slow.sendall(opening)
        while not stop.is_set():
            try:
                slow.sendall(b"x")
                if slow.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    cut.append(time.monotonic() - begun)


@pytest.mark.parametrize("opening", [b"GET /tasks HTTP/1.1\r\nHost: h\r\nX-Slow: ", b"POST"], ids=["head", "body"])
def test_slow_clients_do_not_hold_the_api(database: Engine, database_url: str, opening: bytes) -> None:
    """More dripping clients than threads: each is hung up on, and others are answered."""
    port = free_port()
    if opening == b"POST":
        opening = b"POST /rollout/task/submit HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n"
        opening += b"X-API-Key: " + made(database).encode() + b"\r\n\r\n{"
    argv = [sys.executable, "-m", "gunicorn", "--no-control-socket", "workers.api:app", "--threads", "2"]
    argv += ["-k", "tests.integration.test_security.HurriedWorker", "-b", f"127.0.0.1:{port}", "--log-level", "error"]
    argv += ["--graceful-timeout", "1"]
    stop, cut = threading.Event(), list[float]()
    with process(argv, f"http://127.0.0.1:{port}/healthz", {"POLAR_DATABASE_URL": database_url}):
        slow = [threading.Thread(target=drip, args=(port, opening, stop, cut)) for _ in range(4)]
        for thread in slow:
            thread.start()
        time.sleep(0.3)
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=20).status_code == 200
        try:
            until(lambda: len(cut) == 4, 25)
        finally:
            stop.set()
            for thread in slow:
                thread.join(5)


def test_slow_clients_do_not_hold_the_proxy(database_url: str, session_id: str) -> None:
    """Hundreds of unfinished heads take nobody's turn, and a body that does not come ends in a 408."""
    with serve(database_url, Limits(body=0.5)) as url:
        port = int(url.rpartition(":")[2])
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for each in slow:
            each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-Slow: x")
        begun = time.monotonic()
        assert httpx.get(f"{url}/v1/models", headers={"api-key": KEY}).status_code == 200
        assert time.monotonic() - begun < 5
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\napi-key: {KEY}\r\n\r\n{{"
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(head.encode())
            half.settimeout(10)
            assert half.recv(1000).startswith(b"HTTP/1.1 408")
        for each in slow:
            each.close()


# Engines


def test_an_engines_password_is_not_shown(
    database: Engine, proxy: str, api: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One that stands in a lane's base_url stays in the lane: not in errors, nor in the log, nor in `GET /nodes`."""
    caplog.set_level("DEBUG")
    secret = "hush-hush"
    open_session(database, f"http://me:{secret}@127.0.0.1:9")
    body = {"model": "m", "messages": [USER]}
    answer = httpx.post(f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}, timeout=20)
    assert answer.status_code == 503 and "http://***@127.0.0.1:9" in answer.text
    assert secret not in answer.text
    shown = api.get("/nodes").text
    assert "***@127.0.0.1:9" in shown and secret not in shown
    assert holding(database, secret) == ["lanes.engine"]
    assert [record.getMessage() for record in caplog.records if secret in record.getMessage()] == []


def test_an_undeclared_body_has_the_same_limit(database: Engine, database_url: str) -> None:
    """A body in chunks, whose length nobody declared, is refused by API and proxy once it is too long."""

    def chunks() -> Iterator[bytes]:
        yield b'{"instruction": "'
        for _ in range(40):
            yield b" " * 100_000

    port = free_port()
    argv = [sys.executable, "-m", "gunicorn", "--no-control-socket", "workers.api:app", "--threads", "2"]
    argv += ["-k", "workers.serving.patience.Worker", "-b", f"127.0.0.1:{port}", "--log-level", "error"]
    settings = {"POLAR_DATABASE_URL": database_url, "POLAR_MAX_BODY_MB": "1"}
    with process(argv, f"http://127.0.0.1:{port}/healthz", settings):
        url = f"http://127.0.0.1:{port}/rollout/task/submit"
        answer = httpx.post(url, content=chunks(), headers={"X-API-Key": made(database)}, timeout=20)
        assert answer.status_code == 413, answer.text
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
