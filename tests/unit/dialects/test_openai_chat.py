"""OpenAI Chat: what harnesses send in their accents, and answers that the openai package's own types accept."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from polar.dialects.base import BadRequest
from polar.dialects.openai_chat import OpenAIChat
from polar.messages import Answer, FinishReason, Message, ModelRequest, ToolCall

DIALECT = OpenAIChat()
CALL = ToolCall("call_1_0", "look", '{"a": 1}')


def parse(messages: list[Any], **fields: Any) -> ModelRequest:
    """A request with these messages."""
    return DIALECT.parse({"model": "m", "messages": messages, **fields}, {})


def one(entry: dict[str, Any]) -> Message:
    """The only message of a request."""
    return parse([entry]).messages[0]


def answer(message: Message, finish: FinishReason = "stop", **fields: Any) -> Answer:
    """An answer with this message."""
    return Answer("cmp-ab", "m", message, finish, 5, 2, 1, **fields)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"role": "user", "content": "a"}, Message("user", "a")),
        ({"role": "developer", "content": "a"}, Message("system", "a")),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            Message("user", "a\nb"),
        ),
        ({"role": "assistant", "content": None}, Message("assistant", "")),
        ({"role": "assistant"}, Message("assistant", "")),
        ({"role": "assistant", "content": "a", "reasoning_content": "r"}, Message("assistant", "a", "r")),
        ({"role": "assistant", "content": "a", "reasoning": "r"}, Message("assistant", "a", "r")),
        ({"role": "assistant", "content": None, "refusal": "no"}, Message("assistant", "no")),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}]},
            Message("assistant", "a", "r"),
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]},
            Message("tool", "a", tool_call_id="c"),
        ),
    ],
)
def test_messages(entry: dict[str, Any], message: Message) -> None:
    """Every accent comes out as the same message."""
    assert one(entry) == message


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_calls(arguments: Any) -> None:
    """Calls keep id, name and arguments, which some harnesses send as an object."""
    entry = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    (call,) = one({"role": "assistant", "content": "", "tool_calls": [entry]}).tool_calls
    assert call.id == "c"
    assert call.canonical() == ("look", '{"a":1}')


def test_sampling_and_marks() -> None:
    """What can be honoured is sampling, and what cannot is a mark."""
    request = parse(
        [{"role": "user", "content": "a"}],
        temperature=0.5,
        top_p=0.9,
        max_tokens=7,
        max_completion_tokens=9,
        stop="x",
        seed=1,
        presence_penalty=0.1,
        frequency_penalty=None,
        logit_bias={"1": 2},
        tool_choice={"type": "function", "function": {"name": "look"}},
        stream=True,
        stream_options={"include_usage": True},
    )
    asked = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "stop": ("x",), "seed": 1, "presence_penalty": 0.1}
    assert request.sampling.asked() == asked
    assert request.marks == ("logit_bias", "tool_choice")
    assert (request.tool_choice, request.include_usage) == ("look", True)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1].image_url",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"tools": [{"type": "computer"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"model": None}, "model"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop[0]"),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_refusals(fields: dict[str, Any], field: str) -> None:
    """What cannot be honoured is refused by the name of the field."""
    with pytest.raises(BadRequest) as caught:
        DIALECT.parse({"model": "m", "messages": [USER], **fields}, {})
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("message", "finish"),
    [
        (Message("assistant", "a"), "stop"),
        (Message("assistant", ""), "length"),
        (Message("assistant", "", None, (CALL,)), "tool_calls"),
        (Message("assistant", "a", "r", (CALL, CALL)), "tool_calls"),
    ],
)
def test_answers_fit_the_official_types(message: Message, finish: FinishReason) -> None:
    """An answer, and the chunks of the same answer, pass the openai package's strict validation."""
    request = parse([USER], logprobs=True, stream_options={"include_usage": True})
    given = answer(message, finish, token_texts=("a", "☀"), logprobs=(-0.5, -1.0))
    whole = ChatCompletion.model_validate(DIALECT.answer(request, [given, given]), strict=True)
    assert whole.choices[1].index == 1
    assert whole.choices[0].logprobs.content[1].bytes == list("☀".encode())
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 4, 9)
    stream = DIALECT.open_stream(request, given.id)
    events = [*stream.finish([given]), *stream.last([given])]
    assert events.pop() == b"data: [DONE]\n\n"
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "), strict=True) for event in events]
    assert {chunk.id for chunk in chunks} == {whole.id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == finish
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 7
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls if call.id] == list(range(len(message.tool_calls)))
    for index, call in enumerate(message.tool_calls):
        deltas = [delta for delta in calls if delta.index == index]
        assert "".join(delta.function.arguments for delta in deltas) == call.arguments


def test_usage_only_if_asked() -> None:
    """A client that did not ask for usage gets no chunk without choices, which some cannot read."""
    stream = DIALECT.open_stream(parse([USER]), "cmp-ab")
    given = answer(Message("assistant", "a"))
    events = [*stream.finish([given]), *stream.last([given])]
    assert b"usage" not in b"".join(events)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"api-key": "k"}, "k"),
        ({"authorization": "Basic k", "api-key": "l"}, "l"),
        ({"authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_secret(headers: dict[str, str], key: str | None) -> None:
    """The key is where OpenAI's and Azure's clients put it."""
    assert DIALECT.secret(headers, {}) == key


def test_models() -> None:
    """The model list fits the official type, and a model that is not there is a 404 that names those that are."""
    models = [{"id": "a/b", "context_length": 7}]
    listed = DIALECT.models("models", models, {})
    assert Model.model_validate(listed["data"][0], strict=True).id == "a/b"
    assert DIALECT.models("model", models, {"model": "a/b"})["max_model_len"] == 7
    with pytest.raises(BadRequest, match="a/b") as caught:
        DIALECT.models("model", models, {"model": "c"})
    assert caught.value.status == 404


def test_error_shape() -> None:
    """Errors have OpenAI's four fields."""
    body = DIALECT.error(400, "context_length_exceeded", "too long", field="messages")
    expected = {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert body == {"error": expected}
    assert orjson.loads(DIALECT.error_event(502, "c", "m").removeprefix(b"data: "))["error"]["type"] == "server_error"


def test_several_samples_stream() -> None:
    """Each of n samples has its own index and finish reason in the stream."""
    request = parse([USER], n=2, stream=True)
    given = [answer(Message("assistant", "a")), answer(Message("assistant", "b", None, (CALL,)), "tool_calls")]
    stream = DIALECT.open_stream(request, "cmp-ab")
    events = [*stream.text("a"), *stream.finish(given), *stream.last(given)]
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: ")) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = ["".join(each.delta.content or "" for each in choices if each.index == index) for index in (0, 1)]
    assert texts == ["a", "b"]
    assert [(each.index, each.finish_reason) for each in choices if each.finish_reason] == [
        (0, "stop"),
        (1, "tool_calls"),
    ]


def test_pictures_and_files_keep_their_places() -> None:
    """Parts stay in order; what a text model cannot see is said in words and kept for one that can."""
    parts = [
        {"type": "text", "text": "before"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "text", "text": "after"},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,QUJD"}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
    ]
    request = parse([{"role": "user", "content": parts}])
    (message,) = request.messages
    assert message.content == (
        "before\n[image: image/png, 3 bytes]\nafter\n[document: a.txt]\nABC\n[audio; its content cannot be shown here]"
    )
    (image,) = message.images
    assert message.content[image.start : image.end] == "[image: image/png, 3 bytes]"
    assert request.marks == ("content_unread",)
    assert message.chat_form()["content"][1]["image_url"]["url"] == f"polar-media:{image.digest()}"


def test_freeform_tools() -> None:
    """A custom tool is a function to the model and a custom tool to the harness."""
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Patch."}}
    back = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}
    request = parse([USER, {"role": "assistant", "tool_calls": [back]}], tools=[tool])
    call = request.messages[1].tool_calls[0]
    assert (request.tools[0].kind, call.arguments) == ("custom", '{"input":"*** x"}')
    given = answer(Message("assistant", "", None, (ToolCall("c", "patch", '{"input": "*** x"}'),)), "tool_calls")
    whole = ChatCompletion.model_validate(DIALECT.answer(request, [given]), strict=True)
    assert whole.choices[0].message.tool_calls[0].custom.input == "*** x"


def test_structured_output() -> None:
    """A schema becomes a constraint of sampling."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    assert parse([USER], response_format=form).sampling.json_schema == '{"type":"array"}'
    assert parse([USER], response_format={"type": "json_object"}).sampling.json_schema == '{"type":"object"}'
    assert parse([USER], response_format={"type": "text"}).sampling.json_schema is None
