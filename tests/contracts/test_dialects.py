"""What every dialect promises, whatever its wire looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from polar.dialects import DIALECTS
from polar.dialects.base import BadRequest, Dialect
from polar.messages import Answer, Message, ToolCall
from polar.registry import load

QUESTIONS: Mapping[str, tuple[dict[str, Any], dict[str, str]]] = {
    "anthropic_messages": (
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello ☀"}]},
        {},
    ),
    "google_generate": (
        {
            "contents": [{"role": "user", "parts": [{"text": "hello ☀"}]}],
            "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        },
        {"model": "m", "alt": "sse"},
    ),
    "openai_chat": ({"model": "m", "messages": [{"role": "user", "content": "hello ☀"}]}, {}),
    "openai_responses": ({"model": "m", "input": "hello ☀"}, {}),
}
"""One small request of each dialect: body and path parameters."""

ANSWER = Answer(
    id="cmp-0123456789abcdef01234567",
    model="m",
    message=Message(
        "assistant",
        "Let me look. ☀",
        "Hm.",
        (ToolCall("call_a_0", "look", '{"a":1}'), ToolCall("call_a_1", "look", "{}")),
    ),
    finish_reason="tool_calls",
    prompt_tokens=11,
    completion_tokens=22,
    created=1,
)


@pytest.fixture(params=sorted(DIALECTS))
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """Each member."""
    return load("dialect", DIALECTS, request.param, Dialect)()  # type: ignore[type-abstract]


def test_is_named_and_routed(dialect: Dialect) -> None:
    """A dialect is listed under its own name and has a route to generate by."""
    assert DIALECTS[dialect.name].endswith(type(dialect).__name__)
    assert any(route.kind == "generate" for route in dialect.routes)
    assert all(route.path.startswith("/") for route in dialect.routes)


def test_parses_a_question(dialect: Dialect) -> None:
    """A request comes out in the inside language."""
    body, path_params = QUESTIONS[dialect.name]
    request = dialect.parse(body, path_params)
    assert [(message.role, message.content) for message in request.messages][-1] == ("user", "hello ☀")
    assert (request.n, request.stream) == (1, request.stream)


@pytest.mark.parametrize("value", ["x", 3, [1], {"a": 1}, True, 1.5, [[]], [None], [{}]])
def test_refuses_by_name(dialect: Dialect, value: Any) -> None:
    """A field of the wrong type is refused by its name, or read; nothing else escapes."""
    body, path_params = QUESTIONS[dialect.name]
    for name in [*body, "tools", "temperature", "stop", "stream", "tool_choice", "max_tokens", "n", "seed"]:
        try:
            dialect.parse({**body, name: value}, path_params)
        except BadRequest as error:
            assert error.status == 400
            assert error.field
            assert error.field.partition("[")[0].partition(".")[0] in error.message


def test_answers_hold_everything(dialect: Dialect) -> None:
    """Text, reasoning, tool calls with our ids, and exact usage are all in the answer and in the stream."""
    body, path_params = QUESTIONS[dialect.name]
    request = dialect.parse(body, path_params)
    whole = orjson.dumps(dialect.answer(request, [ANSWER])).decode()
    stream = dialect.open_stream(request, ANSWER.id)
    events = [*stream.finish([ANSWER]), *stream.last([ANSWER])]
    for text in (whole, b"".join(events).decode()):
        for part in ("Let me look. ☀", "Hm.", "look", "call_a_0", "call_a_1"):
            assert part in text
    assert "11" in whole
    assert "22" in whole


def test_streamed_pieces_are_not_sent_twice(dialect: Dialect) -> None:
    """What left as it was sampled is left out of the end of the stream."""
    body, path_params = QUESTIONS[dialect.name]
    unstreamed = dialect.open_stream(dialect.parse(body, path_params), ANSWER.id)
    whole = b"".join([*unstreamed.finish([ANSWER]), *unstreamed.last([ANSWER])]).decode()
    stream = dialect.open_stream(dialect.parse(body, path_params), ANSWER.id)
    events = [
        *stream.start(11),
        *stream.reasoning("Hm."),
        *stream.text("Let me look. ☀"),
        *stream.call(ANSWER.message.tool_calls[0]),
        *stream.finish([ANSWER]),
        *stream.last([ANSWER]),
    ]
    text = b"".join(events).decode()
    assert text.count("Hm.") == whole.count("Hm.")
    assert text.count("look. ☀") == whole.count("look. ☀")
    assert text.count("call_a_0") == whole.count("call_a_0")
    assert all(event.endswith(b"\n\n") for event in events)


def test_errors_speak(dialect: Dialect) -> None:
    """Errors carry their sentence, in a body and inside a stream."""
    assert "the sentence" in orjson.dumps(dialect.error(502, "some_code", "the sentence")).decode()
    event = dialect.error_event(502, "some_code", "the sentence")
    assert b"the sentence" in event
    assert event.endswith((b"\n\n", b"}"))


def test_keepalive_is_no_answer(dialect: Dialect) -> None:
    """What keeps a stream alive is a whole event or comment."""
    assert dialect.keepalive.endswith(b"\n\n")
