"""Anthropic Messages end to end: the official client, a real server, a scripted engine, and the rows in Postgres."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import beta_tool
from anthropic.types import Message
from anthropic.types.beta import BetaMessage
from sqlalchemy import Engine

from polar.renderers import for_folder
from tests.integration.rig import KEY, MODEL, WEATHER, client, completions, free_port, ids, open_session, serve, until

pytestmark = pytest.mark.integration

SCHEMA = WEATHER["function"]["parameters"]
LOOK = {"name": "look", "description": "Look somewhere.", "input_schema": SCHEMA}
ASK: dict[str, Any] = {"model": "m", "max_tokens": 500, "tools": [LOOK]}
USER = {"role": "user", "content": "How is the weather?"}
PIXEL = "iVBORw0KGgo="


def harness(url: str, key: str = KEY, **options: Any) -> anthropic.Anthropic:
    """The official client, which retries nothing unless told."""
    return anthropic.Anthropic(base_url=url, api_key=key, **{"max_retries": 0, **options})


def second_turn(message: Message | BetaMessage, result: Any = "sunny") -> list[dict[str, Any]]:
    """History as harnesses send it back: a cache mark moved, the system's form and the input's order changed."""
    echoed = [block.model_dump(exclude_none=True) for block in message.content]
    use = echoed[-1]
    use["input"] = dict(sorted(use["input"].items()))
    back = {"type": "tool_result", "tool_use_id": use["id"], "content": result}
    asked = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
    marked = {**back, "cache_control": {"type": "ephemeral"}}
    return [asked, {"role": "assistant", "content": echoed}, {"role": "user", "content": [marked]}]


def check_two_turns(database: Engine, result: str = "sunny") -> None:
    """The second prompt is the first, its output, and the tool's result, token for token."""
    first, second = completions(database)
    renderer = for_folder(MODEL)
    whole = ids(first.suffix_ids) + ids(first.output_ids) + ids(second.suffix_ids)
    assert (second.parent_id, second.parent_reason) == (first.id, "anchor")
    assert second.prompt_len == len(whole)
    assert renderer.decode(ids(first.output_ids)).endswith("</tool_call><|im_end|>")
    assert renderer.decode(ids(second.suffix_ids)) == (
        f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [row.outcome for row in (first, second)] == ["answered", "answered"]
    assert all(row.prompt_verified for row in (first, second))
    assert {row.dialect for row in (first, second)} == {"anthropic_messages"}
    until(lambda: all(row.delivered for row in completions(database)))


def check_first(message: Message | BetaMessage) -> None:
    """The scripted engine's first answer, whole."""
    thinking, text, use = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "I should look.", "Let me look.")
    assert (use.name, use.input, message.stop_reason) == ("look", {"where": "outside", "n": 1}, "tool_use")


def test_two_turns(database: Engine, proxy: str, session_id: str) -> None:
    """The official client holds a tool conversation, and a count before the second call is exactly its prompt."""
    create = harness(proxy).messages.create
    first = create(messages=[USER], **ASK)
    check_first(first)
    history = second_turn(first)
    counted = harness(proxy).messages.count_tokens(model="m", messages=history, tools=[LOOK])
    second = create(messages=history, **ASK)
    assert second.content[0].text == "It is sunny. ☀"
    assert (second.stop_reason, second.stop_sequence) == ("end_turn", None)
    check_two_turns(database)
    prompt = completions(database)[1].prompt_len
    usage = second.usage
    spent = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == spent == prompt


def test_two_turns_streamed(database: Engine, proxy: str, session_id: str) -> None:
    """The client's stream helper puts the same messages together from events."""
    found = []
    messages: list[Any] = [USER]
    for _ in range(2):
        with harness(proxy).messages.stream(messages=messages, **ASK) as stream:
            kinds = [event.type for event in stream]
            found.append(stream.get_final_message())
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        messages = second_turn(found[0])
    check_first(found[0])
    assert found[1].content[0].text == "It is sunny. ☀"
    assert found[1].usage.input_tokens == completions(database)[1].prompt_len
    check_two_turns(database)


def test_two_turns_async_by_path_key(database: Engine, proxy: str, session_id: str) -> None:
    """The asynchronous client, known by its base URL, streams raw events of the beta API."""

    async def ask() -> None:
        async with anthropic.AsyncAnthropic(base_url=f"{proxy}/s/{KEY}", api_key="anything") as asked:
            first = await asked.beta.messages.create(messages=[USER], betas=["context-management-2025-06-27"], **ASK)
            check_first(first)
            events = await asked.messages.create(messages=second_turn(first), stream=True, **ASK)
            said = [event.delta.text async for event in events if event.type == "content_block_delta"]
            assert "".join(said) == "It is sunny. ☀"

    asyncio.run(ask())
    check_two_turns(database)


def test_tool_runner(database: Engine, proxy: str, session_id: str) -> None:
    """The client's own agent loop, which sends only what is new in each turn, calls its tool and comes to an end."""
    seen: list[str] = []

    @beta_tool
    def look(where: str, n: int) -> str:
        """Look somewhere."""
        seen.append(where * n)
        return "sunny"

    runner = harness(proxy).beta.messages.tool_runner(model="m", max_tokens=500, tools=[look], messages=[USER])
    assert runner.until_done().content[0].text == "It is sunny. ☀"
    assert seen == ["outside"]
    check_two_turns(database)
    assert completions(database)[1].parsed["marks"] == []
    lost = {"type": "continue", "previous_message_id": f"msg_{'f' * 24}"}
    with pytest.raises(anthropic.NotFoundError) as caught:
        harness(proxy).beta.messages.create(messages=[USER], thread=lost, **ASK)
    assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_comes_back(database: Engine, proxy: str, session_id: str, display: str) -> None:
    """A turn is known by the signature of its thinking whose text was hidden or dropped, with its calls renamed."""
    thinking = {"type": "adaptive", "display": display}
    first = harness(proxy).messages.create(messages=[USER], thinking=thinking, **ASK)
    history = second_turn(first)
    block = history[1]["content"][0]
    assert block["thinking"] == ("" if display == "omitted" else "I should look.")
    block["thinking"] = ""
    history[1]["content"][2]["id"] = history[2]["content"][0]["tool_use_id"] = "toolu_of_mine"
    harness(proxy).messages.create(messages=history, thinking=thinking, **ASK)
    check_two_turns(database)


def test_picture_in_a_tool_result(database: Engine, proxy: str, session_id: str) -> None:
    """A picture that a tool read is there in words for a model that sees none, and the completion says so."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    first = harness(proxy).messages.create(messages=[USER], **ASK)
    history = second_turn(first, [{"type": "text", "text": "seen:"}, image])
    harness(proxy).messages.create(messages=history, **ASK)
    check_two_turns(database, "seen:\n[image: image/png, 9 bytes]")
    assert completions(database)[1].parsed["marks"] == ["images_unseen"]


def test_models_are_each_dialects_own(proxy: str, session_id: str) -> None:
    """Two dialects share the paths of models: each client gets its own form."""
    assert [model.id for model in harness(proxy).models.list()] == ["polar-scripted"]
    assert harness(proxy).models.retrieve("polar-scripted").type == "model"
    assert [model.object for model in client(proxy).models.list()] == ["model"]
    with pytest.raises(anthropic.NotFoundError, match="polar-scripted"):
        harness(proxy).models.retrieve("gone")


def test_probes(proxy: str) -> None:
    """Claude Code's probe is answered without a key."""
    assert httpx.head(f"{proxy}/api/hello").status_code == 200
    assert httpx.get(f"{proxy}/s/whatever/api/hello").status_code == 200


def test_errors_are_typed(database: Engine, database_url: str, engine_url: str) -> None:
    """Each refusal is the client's own exception, with its sentence."""
    open_session(database, engine_url, max_turns=1)
    with serve(database_url) as proxy:
        create = harness(proxy).messages.create
        with pytest.raises(anthropic.AuthenticationError, match="belongs to no session"):
            harness(proxy, "wrong").messages.create(messages=[USER], **ASK)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens: Field required"):
            create(messages=[USER], model="m", max_tokens=9, extra_body={"max_tokens": None})
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 262144 maximum"):
            create(messages=[{"role": "user", "content": "word " * 300_000}], **ASK)
        with pytest.raises(anthropic.NotFoundError, match="/v1/messages/batches") as caught:
            harness(proxy).messages.batches.list()
        assert caught.value.body["error"]["type"] == "not_found_error"
        answer = create(messages=[USER], **ASK)
        assert answer._request_id == completions(database)[-1].id
        with pytest.raises(anthropic.PermissionDeniedError, match="may make 1 model calls"):
            create(messages=[USER, USER], **ASK)


@pytest.mark.parametrize("stream", [False, True])
def test_engine_down(database: Engine, proxy: str, stream: bool) -> None:
    """An engine that stays away is an overloaded provider, before the first byte or after it."""
    open_session(database, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(anthropic.APIStatusError) as caught:
        for _ in harness(proxy).messages.create(messages=[USER], stream=stream, **ASK):
            continue
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_keep_alive(database: Engine, proxy: str, session_id: str) -> None:
    """While the engine is silent a stream carries pings, each a whole event."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "wait"}], "stream": True}
    reply = httpx.post(f"{proxy}/v1/messages?beta=true", json=body, headers={"authorization": f"Bearer {KEY}"})
    events = reply.text.strip().split("\n\n")
    assert events.count('event: ping\ndata: {"type": "ping"}') >= 2
    assert json.loads(events[-1].partition("data: ")[2]) == {"type": "message_stop"}


def test_stop_sequence(database: Engine, proxy: str, session_id: str) -> None:
    """The stop sequence that ended an answer is named and not shown."""
    answer = harness(proxy).messages.create(
        messages=[{"role": "user", "content": "wait"}], stop_sequences=["ted"], **ASK
    )
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("wai", "stop_sequence", "ted")
