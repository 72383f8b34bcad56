"""The Responses API end to end: the official client, a real server, a scripted engine, and the rows in Postgres."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar.models import Completion
from polar.renderers import for_folder
from polar.stages.calls import load_calls
from tests.integration.rig import KEY, MODEL, client, completions, free_port, ids, open_session, process, serve, until

pytestmark = pytest.mark.integration

LOOK: Any = {"type": "function", "strict": False, **{"name": "look", "description": "Look somewhere."}}
LOOK["parameters"] = {"type": "object", "properties": {"where": {"type": "string"}}}
ASK: Any = {"model": "m", "tools": [LOOK]}
USER = "How is the weather?"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def sunny(response: Any) -> dict[str, Any]:
    """The result of the one call in a response."""
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"where": "outside", "n": 1}
    return {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}


def check_continued(first: Completion, second: Completion, reason: str = "anchor") -> None:
    """The second prompt is the first, its output, and the tool's result, token for token."""
    renderer = for_folder(MODEL)
    whole = ids(first.suffix_ids) + ids(first.output_ids) + ids(second.suffix_ids)
    assert (second.parent_id, second.parent_reason, second.flags) == (first.id, reason, [])
    assert second.prompt_len == first.prompt_len + len(ids(first.output_ids)) + len(ids(second.suffix_ids))
    assert first.parent_id is not None or second.prompt_len == len(whole)
    assert renderer.decode(ids(second.suffix_ids)) == (
        "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.prompt_verified
    assert second.prompt_verified


def echoed(response: Any) -> list[dict[str, Any]]:
    """Output items as a client sends them back."""
    return [item.model_dump(exclude_none=True, by_alias=True) for item in response.output]


@pytest.mark.parametrize("fields", [{}, {"store": False, "include": ["reasoning.encrypted_content"]}])
def test_two_turns(database: Engine, proxy: str, session_id: str, fields: dict[str, Any]) -> None:
    """A client that sends its whole history back holds a tool conversation in which no token is rendered twice."""
    create = client(proxy).responses.create
    first = create(input=USER, **ASK, **fields)
    Response.model_validate(first.model_dump(exclude_unset=True), strict=True)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert (first.output_text, first.status) == ("Let me look.", "completed")
    user = {"role": "user", "content": USER}
    second = create(input=[user, *echoed(first), sunny(first)], **ASK, **fields)
    assert second.output_text == "It is sunny. ☀"
    one, two = completions(database)
    assert second.usage.input_tokens == two.prompt_len
    check_continued(one, two)


def test_sealed_reasoning_alone_names_its_completion(database: Engine, proxy: str, session_id: str) -> None:
    """A client that keeps no ids of ours, but reasoning as it was sealed, goes on where it was."""
    create = client(proxy).responses.create
    first = create(input=USER, include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}, **ASK)
    reasoning, message, _ = echoed(first)
    assert reasoning["summary"][0]["text"] == "I should look."
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    said = {"role": "assistant", "content": message["content"][0]["text"] + " "}
    call = {"type": "function_call", "call_id": "own_id", "name": "look", "arguments": '{"n":1,"where":"outside"}'}
    result = {"type": "function_call_output", "call_id": "own_id", "output": "sunny"}
    create(input=[{"role": "user", "content": USER}, sealed, said, call, result], **ASK)
    check_continued(*completions(database))


def events_of(stream: Any) -> list[Any]:
    """All events, each of which the package's own type accepts."""
    found = list(stream)
    for number, event in enumerate(found):
        EVENT.validate_python(event.model_dump(exclude_unset=True), strict=True)
        assert event.sequence_number == number
    return found


def test_streamed_and_continued_by_id(database: Engine, proxy: str, session_id: str) -> None:
    """A chain of streams that only name what came before is one conversation, token for token."""
    create = client(proxy).responses.create
    *_, last = events_of(create(input=USER, stream=True, **ASK))
    assert last.type == "response.completed"
    first = last.response
    events = events_of(create(input=[sunny(first)], previous_response_id=first.id, stream=True, **ASK))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    second = events[-1].response
    assert "".join(deltas) == second.output_text == "It is sunny. ☀"
    assert second.previous_response_id == first.id
    third = create(input="And now?", previous_response_id=second.id, **ASK)
    one, two, three = completions(database)
    check_continued(one, two)
    assert (three.parent_id, three.parent_reason, three.flags) == (two.id, "anchor", [])
    # Each body is recorded whole, so a builder reads it without the others.
    with Session(database) as db:
        calls = load_calls(db, session_id, 1)
    assert [message["role"] for message in calls[2].request["messages"]] == [
        *("user", "assistant", "tool", "assistant", "user"),
    ]
    listed = client(proxy).responses.input_items.list(third.id, order="asc")
    assert [item.type for item in listed] == [
        *("message", "reasoning", "message", "function_call", "function_call_output", "message", "message"),
    ]


def test_the_key_in_a_conversation_does_not_break_it(database: Engine, proxy: str, session_id: str) -> None:
    """What is masked in the record is put back before the conversation goes on from it."""
    create = client(proxy).responses.create
    first = create(input=f"I am {KEY}", **ASK)
    create(input=[sunny(first)], previous_response_id=first.id, **ASK)
    one, two = completions(database)
    check_continued(one, two)
    assert KEY.encode() not in one.request


def test_stream_helper_and_parse(database: Engine, proxy: str, session_id: str) -> None:
    """The client's own accumulation of a stream agrees with the response at its end, with and without a summary."""
    for fields in ({}, {"reasoning": {"summary": "auto"}}):
        with client(proxy).responses.stream(input=USER, **ASK, **fields) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        thought = "response.reasoning_summary_text.done" if fields else "response.reasoning_text.done"
        assert thought in kinds
        assert final.output_text == "Let me look."


def test_parse_into_a_model(database: Engine, proxy: str, session_id: str) -> None:
    """An answer in JSON comes back as the client's own type; the schema is a constraint of sampling."""

    class Sky(pydantic.BaseModel):
        sky: str

    parsed = client(proxy).responses.parse(model="m", input="the sky in JSON", text_format=Sky)
    assert parsed.output_parsed == Sky(sky="blue")
    (row,) = completions(database)
    assert json.loads(row.parsed["asked"]["json_schema"])["properties"] == {"sky": {"title": "Sky", "type": "string"}}


def test_async_client_by_path_key(database: Engine, proxy: str, session_id: str) -> None:
    """The asynchronous client streams, by the key in its base URL."""

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{proxy}/s/{KEY}/v1", api_key="anything") as harness:
            return [event async for event in await harness.responses.create(input=USER, stream=True, **ASK)]

    events = asyncio.run(ask())
    assert events[-1].response.output_text == "Let me look."


def test_stored_responses(database: Engine, proxy: str, session_id: str) -> None:
    """A response can be fetched until it is deleted, by its own session only, and cannot be cancelled."""
    api = client(proxy).responses
    given = api.create(input=USER, **ASK)
    assert api.retrieve(given.id) == given
    assert [item.type for item in api.input_items.list(given.id)] == ["message"]
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        api.cancel(given.id)
    with pytest.raises(openai.NotFoundError):
        api.retrieve("resp_000000000000000000000000")
    with pytest.raises(openai.NotFoundError):
        api.retrieve("resp_%00")
    deleted = httpx.delete(f"{proxy}/v1/responses/{given.id}", headers={"authorization": f"Bearer {KEY}"})
    assert deleted.json() == {"id": given.id, "object": "response", "deleted": True}
    for act in (api.retrieve, api.delete, api.input_items.list):
        with pytest.raises(openai.NotFoundError):
            act(given.id)
    with pytest.raises(openai.BadRequestError) as refused:
        api.create(input="go on", previous_response_id=given.id, **ASK)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    (row,) = completions(database)
    assert row.flags == ["forgotten"]


def test_another_session_sees_nothing(database: Engine, proxy: str, session_id: str) -> None:
    """An id of one session is nobody's in another."""
    given = client(proxy).responses.create(input=USER, **ASK)
    with database.begin() as db:
        db.exec_driver_sql("UPDATE sessions SET attempt = 2")
    with pytest.raises(openai.NotFoundError):
        client(proxy).responses.retrieve(given.id)


def test_unstored_responses(database: Engine, proxy: str, session_id: str) -> None:
    """What was asked for with store: false is not there afterwards."""
    api = client(proxy).responses
    given = api.create(input=USER, store=False, **ASK)
    with pytest.raises(openai.NotFoundError):
        api.retrieve(given.id)
    with pytest.raises(openai.BadRequestError, match="no stored response"):
        api.create(input="go on", previous_response_id=given.id, **ASK)


def test_references_to_items(database: Engine, proxy: str, session_id: str) -> None:
    """Items that are named instead of sent are the stored ones."""
    create = client(proxy).responses.create
    first = create(input=USER, **ASK)
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    create(input=[{"role": "user", "content": USER}, *named, sunny(first)], **ASK)
    check_continued(*completions(database))
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.id"):
        create(input=[{"type": "item_reference", "id": "msg_000000000000000000000000"}], **ASK)


def test_counting_is_exact(database: Engine, proxy: str, session_id: str) -> None:
    """The count of a prompt is its length when it is sampled from, also of one that goes on by id."""
    api = client(proxy).responses
    counted = api.input_tokens.count(input=USER, tools=[LOOK])
    first = api.create(input=USER, **ASK)
    assert counted.input_tokens == first.usage.input_tokens
    more = {"input": [sunny(first)], "previous_response_id": first.id, "tools": [LOOK]}
    counted = api.input_tokens.count(**more)
    assert api.create(model="m", **more).usage.input_tokens == counted.input_tokens
    assert len(completions(database)) == 2


def test_compaction(database: Engine, proxy: str, session_id: str) -> None:
    """A conversation is replaced by the user's messages and a summary that the model wrote."""
    api = client(proxy).responses
    first = api.create(input=USER, **ASK)
    compacted = api.compact(model="m", input=[{"role": "user", "content": USER}, *echoed(first), sunny(first)])
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    history = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    api.create(input=[*history, {"role": "user", "content": "go on"}], **ASK)
    with Session(database) as db:
        calls = load_calls(db, session_id, 1)
    summary = calls[1].answer["content"]
    assert [message["content"] for message in calls[2].request["messages"]][1].endswith(summary)
    streamed = events_of(
        api.create(input=[{"role": "user", "content": USER}, {"type": "compaction_trigger"}], stream=True, **ASK)
    )
    assert [item.type for item in streamed[-1].response.output] == ["compaction"]


def test_cut_off_answers_say_so(database: Engine, proxy: str, session_id: str) -> None:
    """An answer that hit its limit is incomplete, whole and streamed."""
    create = client(proxy).responses.create
    whole = create(model="m", input="hello", max_output_tokens=4)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = events_of(create(model="m", input="hello there", max_output_tokens=4, stream=True))
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_logprobs(database: Engine, proxy: str, session_id: str) -> None:
    """Log-probabilities are those of the recorded tokens."""
    create = client(proxy).responses.create
    for stream in (False, True):
        given = create(input=USER, include=["message.output_text.logprobs"], stream=stream, **ASK)
        response = events_of(given)[-1].response if stream else given
        (message,) = [item for item in response.output if item.type == "message"]
        row = completions(database)[-1]
        assert len(message.content[0].logprobs) == len(ids(row.output_ids))


def test_repeats_join_whatever_the_order_of_their_keys(database: Engine, proxy: str, session_id: str) -> None:
    """A client that shuffles the keys of the same body repeats its call."""
    bodies = [{"model": "m", "input": "wait", "metadata": {"a": "1", "b": "2"}}]
    bodies.append({"metadata": {"b": "2", "a": "1"}, "input": "wait", "model": "m"})

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=10) as harness:
            url, headers = f"{proxy}/v1/responses", {"authorization": f"Bearer {KEY}"}
            return list(await asyncio.gather(*(harness.post(url, json=body, headers=headers) for body in bodies)))

    one, two = asyncio.run(ask())
    assert one.json()["id"] == two.json()["id"]
    assert len(completions(database)) == 1


def handshake(url: str, path: str) -> str:
    """The answer to a WebSocket's opening request."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = [
        f"GET {path} HTTP/1.1",
        f"Host: {host}:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        f"Authorization: Bearer {KEY}",
    ]
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        answer = b""
        while b"upgrade_required" not in answer:
            piece = connection.recv(65536)
            if not piece:
                break
            answer += piece
    return answer.decode()


@pytest.mark.parametrize("path", ["/v1/responses", f"/s/{KEY}/v1/responses", "/responses?model=m"])
def test_a_socket_is_refused(proxy: str, session_id: str, path: str) -> None:
    """A client that wants a WebSocket is told at once to do without, in a body it can read."""
    answer = handshake(proxy, path)
    assert answer.startswith("HTTP/1.1 426 ")
    assert '"code":"upgrade_required"' in answer
    plain = httpx.get(f"{proxy}{path}")
    assert (plain.status_code, plain.headers["allow"]) == (426, "POST")


def test_a_socket_is_refused_under_gunicorn(database: Engine, database_url: str, session_id: str) -> None:
    """The same by the server of a node."""
    port = free_port()
    argv = [sys.executable, "-m", "gunicorn", "workers.proxy:app", "-k", "uvicorn_worker.UvicornWorker"]
    url = f"http://127.0.0.1:{port}"
    with process([*argv, "-b", f"127.0.0.1:{port}"], url, {"POLAR_DATABASE_URL": database_url}):
        assert handshake(url, "/v1/responses").startswith("HTTP/1.1 426 ")
        assert client(url).responses.create(input=USER, **ASK).output_text == "Let me look."


@pytest.fixture
def dying(database: Engine, database_url: str, engine_url: str) -> Iterator[tuple[str, str]]:
    """A proxy whose session's key dies while it answers."""
    session = open_session(database, engine_url)
    with serve(database_url) as url:
        yield url, session


def test_a_stream_that_fails_says_so_and_breaks_off(database: Engine, dying: tuple[str, str]) -> None:
    """A failure in mid-stream is a failed response, after which the connection does not end cleanly."""
    url, _ = dying
    seen: list[Any] = []
    with pytest.raises((httpx.HTTPError, openai.APIConnectionError)):
        for event in client(url).responses.create(model="m", input="count slowly", stream=True):
            seen.append(event)
            if len(seen) == 6:
                with database.begin() as db:
                    db.exec_driver_sql("UPDATE sessions SET attempt = 2")
    assert [event.type for event in seen[:3]] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
    ]
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.status == "failed"
    assert "ended" in seen[-1].response.error.message
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    until(lambda: completions(database)[0].outcome == "failed")
