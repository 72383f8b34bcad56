"""The proxy end to end: the official client, a real server, a scripted engine, and the rows in Postgres."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn
from sqlalchemy import Engine, select, text, update
from sqlalchemy.orm import Session

from polar.models import Completion, Lane, Node, RolloutSession, Task
from polar.proxy.app import create_app
from polar.proxy.limits import Limits
from polar.renderers import for_folder
from polar.settings import Settings
from polar.stages.calls import load_calls

pytestmark = pytest.mark.integration

KEY = "ses-key-of-this-test"
MODEL = Path(__file__).parents[2] / "polar" / "tiny_engine" / "model"
WEATHER = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
SCRIPTS = {
    "scripts": [
        {
            "match": "slowly",
            "answers": [{"content": "one two three four five six seven " * 20}],
            "tokens_per_second": 30,
        },
        {"match": "wait", "answers": [{"content": "waited"}], "latency_seconds": 1.0},
        {
            "answers": [
                {
                    "reasoning": "I should look.",
                    "content": "Let me look.",
                    "tool_calls": [{"name": "look", "arguments": {"where": "outside", "n": 1}}],
                },
                {"content": "It is sunny. ☀"},
            ]
        },
    ]
}
FAST = Limits(retry=1.0, keepalive=0.3, deliver_grace=0.05)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """What `condition` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.02)
    return found


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def process(argv: list[str], health: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process of its own, up while inside."""
    child = subprocess.Popen(argv, env={**os.environ, **(env or {})})
    try:
        until(lambda: answers(health) or child.poll() is not None)
        assert child.poll() is None
        yield child
    finally:
        child.terminate()
        child.wait(15)


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scripted engine."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPTS))
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info"):
        yield f"http://127.0.0.1:{port}"


def open_session(database: Engine, engine_url: str, **spec: Any) -> str:
    """A session that is executing on a lane with this engine, reached by KEY; its id."""
    with Session(database) as db, db.begin():
        task_spec = {"sampling": {}, "max_turns": None, "max_session_tokens": None, "agent": {}, **spec}
        task = Task(task_id=uuid.uuid4().hex, state="running", spec=task_spec, num_samples=1)
        db.add_all([task, Node(id="local", gateway_url="http://127.0.0.1")])
        db.flush()
        db.add(Lane(name="gpu0", node_id="local", engine={"base_url": engine_url}, max_execute=1, ready_buffer=1))
        session = RolloutSession(
            id=f"ses-{uuid.uuid4().hex}",
            task_pk=task.id,
            number=0,
            stage="execute",
            state="running",
            lane="gpu0",
            execute_attempt=1,
            key_hash=hashlib.sha256(KEY.encode()).digest(),
        )
        db.add(session)
        db.flush()
        return session.id


@pytest.fixture
def session_id(database: Engine, engine_url: str) -> str:
    """The session of most tests."""
    return open_session(database, engine_url)


@contextmanager
def serve(database_url: str, limits: Limits = FAST) -> Iterator[str]:
    """The proxy in a thread, with its clocks turned down."""
    port = free_port()
    config = uvicorn.Config(create_app(Settings(database_url=database_url), limits), port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(15)


@pytest.fixture
def proxy(database_url: str) -> Iterator[str]:
    """The proxy in this process."""
    with serve(database_url) as url:
        yield url


def client(url: str, key: str = KEY, **options: Any) -> openai.OpenAI:
    """The official client, which retries nothing unless told."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, **{"max_retries": 0, **options})


def completions(database: Engine) -> list[Completion]:
    """Every row, in order."""
    with Session(database) as db:
        return list(db.scalars(select(Completion).order_by(Completion.seq)))


def ids(data: bytes) -> list[int]:
    """Token ids of a column."""
    return [int(token) for token in np.frombuffer(data, dtype="<i4")]


def second_turn(message: dict[str, Any]) -> list[dict[str, Any]]:
    """History as harnesses send it back: arguments re-serialised, reasoning gone, null for text."""
    call = message["tool_calls"][0]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True, separators=(" ,", " :"))
    echoed = {"role": "assistant", "content": message["content"] + " \n"}
    echoed["tool_calls"] = [{**call, "function": {**call["function"], "arguments": arguments}}]
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    return [{"role": "user", "content": "How is the weather?"}, echoed, result]


def check_two_turns(database: Engine) -> None:
    """The second prompt is the first, its output, and the tool's result, token for token."""
    first, second = completions(database)
    renderer = for_folder(MODEL)
    whole = ids(first.suffix_ids) + ids(first.output_ids) + ids(second.suffix_ids)
    assert (second.parent_id, second.parent_reason) == (first.id, "anchor")
    assert second.prompt_len == len(whole)
    assert renderer.decode(ids(first.output_ids)).endswith("</tool_call><|im_end|>")
    assert renderer.decode(ids(second.suffix_ids)) == (
        "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [row.outcome for row in (first, second)] == ["answered", "answered"]
    assert all(len(row.output_ids) == len(row.logprobs or b"") > 0 for row in (first, second))
    assert all(row.prompt_verified for row in (first, second))
    assert KEY.encode() not in first.request
    until(lambda: all(row.delivered for row in completions(database)))
    with Session(database) as db:
        session = db.scalars(select(RolloutSession)).one()
        assert session.turns == 2
        assert session.sampled_tokens == (len(first.output_ids) + len(second.output_ids)) // 4


def test_two_turns_under_gunicorn(database: Engine, database_url: str, session_id: str) -> None:
    """The official client holds a tool conversation with several processes, and no token is rendered twice."""
    port = free_port()
    argv = [sys.executable, "-m", "gunicorn", "workers.proxy:app", "-k", "uvicorn_worker.UvicornWorker"]
    argv += ["-w", "2", "-b", f"127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"
    with process(argv, url, {"POLAR_DATABASE_URL": database_url}):
        user = {"role": "user", "content": "How is the weather?"}
        answer = client(url).chat.completions.create(model="m", messages=[user], tools=[WEATHER])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert choice.message.reasoning_content == "I should look."
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"where": "outside", "n": 1}
        history = second_turn(choice.message.model_dump())
        # A client of its own: a new connection, which the other process may well get.
        again = client(url).chat.completions.create(model="m", messages=history, tools=[WEATHER])
        assert again.choices[0].message.content == "It is sunny. ☀"
        assert again.usage.prompt_tokens == completions(database)[1].prompt_len
    check_two_turns(database)


def collected(chunks: Iterator[Any]) -> dict[str, Any]:
    """A streamed message put together again."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(message["tool_calls"])
                message["tool_calls"].append(call.model_dump(exclude={"index"}))
            message["finish"] = choice.finish_reason or message.get("finish")
        message["usage"] = chunk.usage
    return message


def test_two_turns_streamed(database: Engine, proxy: str, session_id: str) -> None:
    """A streaming harness gets the same conversation, and usage where it asked for it."""
    options = {"model": "m", "tools": [WEATHER], "stream": True, "stream_options": {"include_usage": True}}
    user = {"role": "user", "content": "How is the weather?"}
    first = collected(client(proxy).chat.completions.create(messages=[user], **options))
    assert (first["content"], first["finish"]) == ("Let me look.", "tool_calls")
    second = collected(client(proxy).chat.completions.create(messages=second_turn(first), **options))
    assert (second["content"], second["finish"]) == ("It is sunny. ☀", "stop")
    assert second["usage"].prompt_tokens == completions(database)[1].prompt_len
    check_two_turns(database)


def test_async_client_by_path_key(database: Engine, proxy: str, session_id: str) -> None:
    """A harness that cannot set a key is known by its base URL."""

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{proxy}/s/{KEY}/v1", api_key="anything") as harness:
            models = await harness.models.list()
            assert [model.id async for model in models] == ["polar-scripted"]
            user = {"role": "user", "content": "hello"}
            return await harness.chat.completions.create(model="m", messages=[user])

    assert asyncio.run(ask()).choices[0].message.content.startswith("Let me look.")
    assert completions(database)[0].parent_reason == "root"


def test_record_first(database: Engine, proxy: str, session_id: str) -> None:
    """When a client holds an answer's first byte, the answer is committed."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"hello, I am {KEY}"}]}
    with httpx.stream("POST", f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}) as reply:
        (row,) = completions(database)
        assert (reply.status_code, row.outcome) == (200, "answered")
        reply.read()


def test_unknown_key(proxy: str, session_id: str) -> None:
    """A key that no session has is refused as OpenAI refuses one."""
    with pytest.raises(openai.AuthenticationError, match="belongs to no session"):
        client(proxy, "wrong").models.list()


@pytest.mark.parametrize("change", [{"state": "completed"}, {"stage": "reconstruct"}, {"key_hash": None}])
def test_ended_session(database: Engine, proxy: str, session_id: str, change: dict[str, Any]) -> None:
    """A key dies with its session, its stage and its attempt."""
    with Session(database) as db, db.begin():
        db.execute(update(RolloutSession).values(**change))
    with pytest.raises(openai.AuthenticationError):
        client(proxy).chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])


def test_session_ends_while_the_engine_works(database: Engine, proxy: str, session_id: str) -> None:
    """An answer that comes after its session moved on is kept on record and given to nobody."""
    errors: list[Exception] = []

    def ask() -> None:
        try:
            client(proxy).chat.completions.create(model="m", messages=[{"role": "user", "content": "wait"}])
        except openai.APIStatusError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: completions(database))
    with Session(database) as db, db.begin():
        db.execute(update(RolloutSession).values(attempt=2))
    thread.join(10)
    (row,) = completions(database)
    assert isinstance(errors[0], openai.AuthenticationError)
    assert (row.outcome, (row.error or {})["code"]) == ("failed", "session_ended")
    with Session(database) as db:
        assert db.scalars(select(RolloutSession.turns)).one() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_engine_down(database: Engine, database_url: str, stream: bool) -> None:
    """An engine that stays away is waited for, then reported in OpenAI's shape and on the record."""
    open_session(database, f"http://127.0.0.1:{free_port()}")
    begun = time.monotonic()
    with serve(database_url, Limits(retry=1.0)) as proxy, pytest.raises(openai.InternalServerError) as caught:
        user = {"role": "user", "content": "hello"}
        client(proxy).chat.completions.create(model="m", messages=[user], stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_down")
    assert time.monotonic() - begun > 0.5
    (row,) = completions(database)
    assert (row.outcome, (row.error or {})["code"]) == ("failed", "engine_down")


def test_engine_down_after_the_first_byte(database: Engine, proxy: str) -> None:
    """A stream that has begun ends in an error event and a reset, never as if it were whole."""
    open_session(database, f"http://127.0.0.1:{free_port()}")
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    seen = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}) as reply,
    ):
        for piece in reply.iter_bytes():
            seen += piece
    assert json.loads(seen.rpartition(b"data: ")[2])["error"]["code"] == "engine_down"


@pytest.mark.parametrize("stream", [False, True])
def test_hang_up(database: Engine, proxy: str, session_id: str, stream: bool) -> None:
    """A harness that hangs up ends the engine's work within a second, and the partial output is on record."""
    body = {"model": "m", "messages": [{"role": "user", "content": "count slowly"}], "stream": stream}
    try:
        with httpx.stream(
            "POST", f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}, timeout=0.7
        ) as reply:
            next(reply.iter_bytes())
    except httpx.ReadTimeout:
        assert not stream
    row = until(lambda: [row for row in completions(database) if row.outcome != "asked"], 2.0)[0]
    assert (row.outcome, row.finish_reason, row.delivered) == ("aborted", "abort", False)
    assert 0 < len(ids(row.output_ids)) < 60
    assert len(row.logprobs) == len(row.output_ids)


def test_repeat_joins(database: Engine, proxy: str, session_id: str) -> None:
    """A call repeated while the first is under way gets the first one's answer; one repeated after is a sibling."""
    user = {"role": "user", "content": "wait"}
    found: list[str] = []

    def ask(**options: Any) -> None:
        answer = client(proxy).chat.completions.create(model="m", messages=[user], **options)
        found.append(collected(answer)["content"] if options else answer.choices[0].message.content)

    threads = [threading.Thread(target=ask), threading.Thread(target=ask, kwargs={"stream": True})]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(10)
    assert found == ["waited", "waited"]
    assert len(completions(database)) == 1
    until(lambda: completions(database)[0].delivered)
    ask()
    first, second = completions(database)
    assert (first.flags, second.flags) == ([], ["sibling"])


def test_undelivered_answer_is_given_again(database: Engine, proxy: str, session_id: str) -> None:
    """An answer that is recorded and that nobody received answers the harness's retry."""
    user = {"role": "user", "content": "hello"}
    ask = client(proxy).chat.completions.create
    first = ask(model="m", messages=[user], tools=[WEATHER])
    until(lambda: completions(database)[0].delivered)
    with Session(database) as db, db.begin():
        db.execute(update(Completion).values(delivered=False))
    with serve(str(database.url.render_as_string(hide_password=False))) as other:
        again = client(other).chat.completions.create(model="m", messages=[user], tools=[WEATHER])
    assert again.choices[0].message == first.choices[0].message
    assert again.usage == first.usage
    assert len(completions(database)) == 1


def test_n_samples_are_siblings(database: Engine, proxy: str, session_id: str) -> None:
    """Each of n samples is a completion of its own."""
    user = {"role": "user", "content": "hello"}
    answer = client(proxy).chat.completions.create(model="m", messages=[user], n=3, logprobs=True)
    assert len(answer.choices) == 3
    rows = completions(database)
    assert [row.flags for row in rows] == [[], ["sibling"], ["sibling"]]
    assert answer.usage.completion_tokens == sum(len(row.output_ids) for row in rows) // 4
    assert len(answer.choices[2].logprobs.content) == len(rows[2].output_ids) // 4


def test_keep_alive_comes_first(database: Engine, proxy: str, session_id: str) -> None:
    """While the engine is silent a stream carries comments, which clients ignore."""
    body = {"model": "m", "messages": [{"role": "user", "content": "wait"}], "stream": True}
    reply = httpx.post(f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY})
    assert reply.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert reply.text.endswith("data: [DONE]\n\n")


def test_text_streams_while_it_is_sampled(database: Engine, proxy: str, session_id: str) -> None:
    """Text leaves as it is sampled, long before the answer is whole."""
    user = {"role": "user", "content": "count slowly"}
    begun, seen = time.monotonic(), ""
    with client(proxy).chat.completions.create(model="m", messages=[user], stream=True) as chunks:
        for chunk in chunks:
            seen += chunk.choices[0].delta.content or ""
            if len(seen) > 20:
                break
    assert "one two three".startswith(seen[:13])
    assert time.monotonic() - begun < 3


def test_budgets(database: Engine, proxy: str, engine_url: str) -> None:
    """The task's turns and sampling hold whatever the harness asks."""
    open_session(database, engine_url, max_turns=1, sampling={"temperature": 0.5, "max_tokens": 4})
    user = {"role": "user", "content": "hello"}
    answer = client(proxy).chat.completions.create(model="m", messages=[user], temperature=0, max_tokens=100)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 4)
    (row,) = completions(database)
    assert row.parsed["asked"] == {"temperature": 0, "max_tokens": 100}
    assert row.parsed["sampled_with"] == {"temperature": 0.5, "max_tokens": 4}
    with pytest.raises(openai.PermissionDeniedError, match="may make 1 model calls"):
        client(proxy).chat.completions.create(model="m", messages=[user, user])


@pytest.mark.parametrize(
    ("path", "body", "status", "needle"),
    [
        ("/v1/chat/completions", b"{", 400, "not valid JSON"),
        ("/v1/chat/completions", b"[]", 400, "JSON object"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
        ("/v1/chat/completions", b" " * (2 * 2**20), 413, "POLAR_MAX_BODY_MB"),
        ("/v1/embeddings", b"{}", 404, "/v1/chat/completions"),
        ("/v1/models", b"{}", 405, "/v1/models"),
    ],
)
def test_refusals(database_url: str, session_id: str, path: str, body: bytes, status: int, needle: str) -> None:
    """What cannot be answered is refused in JSON that names the cause."""
    app = create_app(Settings(database_url=database_url, max_body_mb=1))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://proxy") as harness,
        ):
            return await harness.post(path, content=body, headers={"api-key": KEY})

    reply = asyncio.run(ask())
    assert reply.status_code == status
    assert needle in reply.json()["error"]["message"]


def test_half_an_emoji(database: Engine, proxy: str, session_id: str) -> None:
    """Half a surrogate pair, as harnesses send that cut texts, does not cost the turn."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "cut \\ud83d here \\u0000"}]}'
    reply = httpx.post(f"{proxy}/v1/chat/completions", content=body, headers={"api-key": KEY})
    assert reply.status_code == 200, reply.text
    assert completions(database)[0].outcome == "answered"


def test_one_bad_record_spares_its_neighbours(database: Engine, proxy: str, session_id: str) -> None:
    """A record that the database refuses fails alone, though it shared a transaction."""
    with Session(database) as db, db.begin():
        db.execute(text("ALTER TABLE completions ADD CONSTRAINT no_bad CHECK (model_requested <> 'bad')"))
    found: list[int] = []

    def ask(model: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": f"hello {model}"}]}
        found.append(httpx.post(f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}).status_code)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("bad", "a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [200, 200, 200, 503]


def test_database_drops_its_connections(database: Engine, proxy: str, session_id: str) -> None:
    """A database that restarts costs no call: reads and records are done again."""
    ask = client(proxy).chat.completions.create
    ask(model="m", messages=[{"role": "user", "content": "hello"}])
    with Session(database) as db:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        db.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
    database.dispose()
    ask(model="m", messages=[{"role": "user", "content": "hello again"}])
    assert [row.outcome for row in completions(database)] == ["answered", "answered"]


def test_health(proxy: str) -> None:
    """The base URL answers probes."""
    assert httpx.get(proxy).json() == {"status": "ok", "service": "polar-proxy"}
    assert httpx.head(proxy).status_code == 200


def test_builders_can_read_it(database: Engine, proxy: str, session_id: str) -> None:
    """What is recorded is read back as calls whose prompts and answers are whole."""
    user = {"role": "user", "content": "How is the weather?"}
    ask = client(proxy).chat.completions.create
    first = ask(model="m", messages=[user], tools=[WEATHER]).choices[0].message
    ask(model="m", messages=second_turn(first.model_dump()), tools=[WEATHER])
    with Session(database) as db:
        one, two = load_calls(db, session_id, 1)
    assert two.prompt_ids.tolist()[: len(one.prompt_ids) + len(one.output_ids)] == [*one.prompt_ids, *one.output_ids]
    assert one.answer["reasoning_content"] == "I should look."
    assert one.answer["tool_calls"] == [call.model_dump() for call in first.tool_calls]
    assert two.request["tools"] == [WEATHER]
