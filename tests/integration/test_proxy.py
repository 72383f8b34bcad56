"""The proxy end to end: the official client, a real server, a scripted engine, and the rows in Postgres."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from polar.models import Completion, RolloutSession
from polar.proxy.app import create_app
from polar.renderers import for_folder
from polar.settings import Settings
from polar.stages.calls import load_calls
from tests.integration.rig import (
    KEY,
    MODEL,
    WEATHER,
    client,
    completions,
    free_port,
    ids,
    open_session,
    process,
    serve,
    until,
)

pytestmark = pytest.mark.integration


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
                if call.id:
                    assert call.index == len(message["tool_calls"])
                    message["tool_calls"].append(call.model_dump(exclude={"index"}))
                else:
                    message["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments
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
    assert reply.text.count("\n\n: keep-alive\n\n") >= 2
    assert '"role":"assistant"' in reply.text.partition(": keep-alive")[0]
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


def test_it_stops_whenever_it_is_told(database_url: str) -> None:
    """A proxy that is told to stop as it starts does, at whatever point of its beginning that comes."""
    app = create_app(Settings(database_url=database_url))

    async def live(seconds: float) -> None:
        async with asyncio.timeout(10), app.router.lifespan_context(app):
            await asyncio.sleep(seconds)

    for step in range(60):
        asyncio.run(live(step / 3000))


def test_half_an_emoji(database: Engine, proxy: str, session_id: str) -> None:
    """Half a surrogate pair, as harnesses send that cut texts, does not cost the turn."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "cut \\ud83d here \\u0000"}]}'
    reply = httpx.post(f"{proxy}/v1/chat/completions", content=body, headers={"api-key": KEY})
    assert reply.status_code == 200, reply.text
    assert completions(database)[0].outcome == "answered"


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
