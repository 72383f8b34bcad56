"""Anthropic Messages: answers, events and errors that the anthropic package's own types accept."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from anthropic.types import Message as Served
from anthropic.types import ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import BadRequest
from polar.dialects.seals import unseal
from polar.messages import Answer, FinishReason, Message, ModelRequest, ToolCall

DIALECT = AnthropicMessages()
ID = "cmp-0123456789abcdef01234567"
NAME = ID.removeprefix("cmp-")
CALL = ToolCall(f"call_{NAME}_0", "look", '{"b": 1, "a": [2]}')
USER = {"role": "user", "content": "a"}
EVENTS: list[TypeAdapter[Any]] = [TypeAdapter(RawMessageStreamEvent), TypeAdapter(BetaRawMessageStreamEvent)]


def parse(messages: list[Any], **fields: Any) -> ModelRequest:
    """A request with these messages."""
    return DIALECT.parse({"model": "m", "max_tokens": 7, "messages": messages, **fields}, {})


def answer(message: Message, finish: FinishReason = "stop", **fields: Any) -> Answer:
    """An answer with this message."""
    return Answer(ID, "m", message, finish, 50, 20, 1, **fields)


def events_of(request: ModelRequest, given: Answer) -> list[dict[str, Any]]:
    """The stream of an answer, each event checked against the official types and its own event line."""
    stream = DIALECT.open_stream(request, given.id)
    found = []
    for event in [*stream.finish([given]), *stream.last([given])]:
        head, _, data = event.partition(b"\n")
        for adapter in EVENTS:
            adapter.validate_json(data.removeprefix(b"data: "), strict=True)
        found.append(orjson.loads(data.removeprefix(b"data: ")))
        assert head == f"event: {found[-1]['type']}".encode()
    return found


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
@pytest.mark.parametrize(
    ("message", "finish", "stop"),
    [
        (Message("assistant", "a"), "stop", "end_turn"),
        (Message("assistant", ""), "stop", "end_turn"),
        (Message("assistant", "", "cut"), "length", "max_tokens"),
        (Message("assistant", "", None, (CALL,)), "tool_calls", "tool_use"),
        (Message("assistant", "a ☀", "r", (CALL, ToolCall("call_1", "look", ""))), "tool_calls", "tool_use"),
        (Message("assistant", "a", "r", (CALL,)), "length", "max_tokens"),
    ],
)
def test_answers_fit_the_official_types(message: Message, finish: FinishReason, stop: str, display: str | None) -> None:
    """An answer and its events pass the anthropic package's validation, and say the same."""
    thinking = {"thinking": {"type": "adaptive", "display": display}} if display else {}
    request = parse([USER], **thinking)
    given = answer(message, finish, cached_tokens=30, reasoning_tokens=3)
    body = orjson.dumps(DIALECT.answer(request, [given]))
    BetaMessage.model_validate_json(body, strict=True)
    whole = Served.model_validate_json(body, strict=True)
    assert (whole.id, whole.stop_reason, whole.stop_sequence) == (f"msg_{NAME}", stop, None)
    events = events_of(request, given)
    assert [events[0]["type"], *(event["type"] for event in events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["id"] == whole.id
    assert events[0]["message"]["usage"]["input_tokens"] == 50
    assert events[-2]["delta"] == {"stop_reason": stop, "stop_sequence": None}
    assert events[-2]["usage"] == orjson.loads(body)["usage"]
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (20, 30, 20)
    assert rebuilt(events) == orjson.loads(body)["content"]
    kinds = [block.type for block in whole.content]
    wanted = ["thinking"] * bool(message.reasoning) + ["text"] * bool(message.content)
    assert kinds == [*wanted, *["tool_use"] * len(message.tool_calls)]
    if message.reasoning:
        sealed = unseal(whole.content[0].signature)
        assert sealed.anchor == NAME
        shown = [message.reasoning, ""]
        assert [whole.content[0].thinking, sealed.reasoning] == (shown[::-1] if display == "omitted" else shown)


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content as a client puts it together, which checks that each block is opened, filled and closed in turn."""
    content: list[dict[str, Any]] = []
    partial, opened = "", False
    for event in events[1:-2]:
        assert event["index"] == len(content) - (0 if event["type"] == "content_block_start" else 1)
        if event["type"] == "content_block_start":
            assert not opened
            content.append(event["content_block"])
            partial, opened = "", True
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[-1]
            partial += delta.get("partial_json", "")
            for name in {"thinking", "signature", "text"} & delta.keys():
                block[name] += delta[name]
        else:
            assert opened
            opened = False
            if partial:
                content[-1]["input"] = orjson.loads(partial)
    assert not opened
    return content


def test_stop_sequence() -> None:
    """A stop sequence is named, but a tool call that was made is what the client must act on."""
    given = answer(Message("assistant", "a"), stop_sequence="END")
    served = DIALECT.answer(parse([USER]), [given])
    assert (served["stop_reason"], served["stop_sequence"]) == ("stop_sequence", "END")
    called = answer(Message("assistant", "", None, (CALL,)), "tool_calls", stop_sequence="END")
    assert DIALECT.answer(parse([USER]), [called])["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"n": 1.50, "s": "☀"}', {"n": 1.5, "s": "☀"}),
        ('{"s": "cut \\ud83d"}', {"s": "cut \ufffd"}),
        ("[1]", {"invalid_arguments": "[1]"}),
        ("{oops", {"invalid_arguments": "{oops"}),
    ],
)
def test_arguments(arguments: str, given: dict[str, Any]) -> None:
    """A tool's input is what the model wrote; what is no object reaches the tool under a name that it will refuse."""
    made = answer(Message("assistant", "", None, (ToolCall("call_1", "look", arguments),)), "tool_calls")
    assert DIALECT.answer(parse([USER]), [made])["content"][0]["input"] == given
    (delta,) = (event["delta"] for event in events_of(parse([USER]), made) if "delta" in event and "index" in event)
    assert delta["partial_json"] == (arguments if "invalid" not in str(given) else orjson.dumps(given).decode())


def test_hidden_thinking_keeps_the_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model thinks that may not be seen thinking, its client still hears something now and then."""
    request = parse([USER], thinking={"type": "adaptive", "display": "omitted"})
    stream = DIALECT.open_stream(request, ID)
    assert b"thinking_delta" not in b"".join([*stream.start(5), *stream.reasoning("deep")])
    assert [*stream.reasoning(" thought")] == []
    monkeypatch.setattr("polar.dialects.anthropic_answers.PING_SECONDS", -1.0)
    assert b"".join(stream.reasoning("!")).startswith(b"event: ping\n")
    closed = b"".join(stream.text("a"))
    signature = orjson.loads(closed.partition(b"\n\n")[0].partition(b"data: ")[2])["delta"]["signature"]
    assert unseal(signature).reasoning == "deep thought!"


def test_context_edits_are_answered() -> None:
    """Who asks for edits of the context hears that none were made."""
    request = parse([USER], context_management={"edits": [{"type": "clear_thinking_20251015"}]})
    body = orjson.dumps(DIALECT.answer(request, [answer(Message("assistant", "a"))]))
    assert BetaMessage.model_validate_json(body, strict=True).context_management.applied_edits == []
    assert events_of(request, answer(Message("assistant", "a")))[-2]["context_management"] == {"applied_edits": []}


@pytest.mark.parametrize(
    ("status", "wire", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (413, 413, "request_too_large"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (502, 502, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_errors(status: int, wire: int, kind: str) -> None:
    """Each failure has Anthropic's status and type, in a body and inside a stream."""
    assert DIALECT.status(status, "c") == wire
    body = DIALECT.error(wire, "c", "why", field="messages")
    assert body == {"type": "error", "error": {"type": kind, "message": "why"}}
    if kind != "request_too_large":
        assert ErrorResponse.model_validate(body, strict=True).error.message == "why"
    assert DIALECT.error_event(wire, "c", "why") == b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "This model's maximum context length is 100 tokens. However, your messages resulted in 120 tokens.",
            "prompt is too long: 120 tokens > 100 maximum",
        ),
        (
            "This model's maximum context length is 100 tokens. However, your messages resulted in 99 tokens.",
            "prompt is too long: 99 tokens > 98 maximum",
        ),
        ("input is longer than the model's context", "prompt is too long: input is longer than the model's context"),
    ],
)
def test_overflow(said: str, told: str) -> None:
    """A prompt that is too long is refused in the words that make Claude Code compact."""
    assert DIALECT.error(400, "context_length_exceeded", said)["error"]["message"] == told


def test_models() -> None:
    """The model list fits the official type, and a model that is not there is a 404 that names those that are."""
    models = [{"id": "a/b", "context_length": 7}, {"id": "c", "context_length": None}]
    listed = DIALECT.models("models", models, {})
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a/b", "c", False)
    for card in listed["data"]:
        ModelInfo.model_validate_json(orjson.dumps(card), strict=True)
    assert DIALECT.models("model", models, {"model": "a/b"})["max_input_tokens"] == 7
    with pytest.raises(BadRequest, match="a/b") as caught:
        DIALECT.models("model", models, {"model": "d"})
    assert caught.value.status == 404
