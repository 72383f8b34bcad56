"""OpenAI Responses: answers pass the openai package's own types, and earlier ones can be named and looked up."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.responses import CompactedResponse, Response, ResponseItemList
from openai.types.responses.input_token_count_response import InputTokenCountResponse

from polar.dialects.base import BadRequest, Earlier
from polar.dialects.openai_responses import SUMMARISE
from polar.dialects.responses_input import SUMMARY
from polar.messages import Answer, Message, ToolCall
from tests.unit.dialects.responses_rig import (
    DIALECT,
    HEX,
    LOOK,
    TOOLS,
    answer,
    call,
    earlier,
    output,
    parse,
    streamed,
    text,
)

CALLS = [
    (ToolCall("c0", "look", '{"a": 1}'), {"type": "function_call", "name": "look", "arguments": '{"a": 1}'}),
    (ToolCall("c1", "patch", '{"input": "x"}'), {"type": "custom_tool_call", "name": "patch", "input": "x"}),
    (ToolCall("c2", "team__ask", "{}"), {"type": "function_call", "name": "ask", "namespace": "team"}),
    (
        ToolCall("c3", "local_shell", '{"command": ["ls"], "timeout_ms": 5}'),
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5}},
    ),
    (
        ToolCall("c4", "shell", '{"commands": ["ls"]}'),
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}},
    ),
    (
        ToolCall("c5", "apply_patch", '{"type": "update_file", "path": "p", "diff": "d"}'),
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "p", "diff": "d"}},
    ),
    (ToolCall("c6", "apply_patch", '{"type": "update_file", "path": "p"}'), {"type": "function_call"}),
    (ToolCall("c7", "shell", "not json"), {"type": "function_call", "name": "shell", "arguments": "not json"}),
    (ToolCall("c8", "unheard_of", "{}"), {"type": "function_call", "name": "unheard_of"}),
]


def test_calls_go_back_as_what_they_are() -> None:
    """A call has the kind of its tool on the wire, unless it does not fit; and its way back is the same call."""
    request = parse("a", tools=TOOLS)
    given = answer("", *(each for each, _ in CALLS), finish="tool_calls")
    whole = DIALECT.answer(request, [given])
    Response.model_validate(whole, strict=True)
    for (each, expected), item in zip(CALLS, whole["output"], strict=True):
        assert {**item, **expected} == item
        assert item["call_id"] == each.id
    (back,) = parse(whole["output"], tools=TOOLS).messages
    assert [each.canonical() for each in back.tool_calls] == [each.canonical() for each, _ in CALLS]
    assert back.anchor == HEX
    events = streamed(request, given)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert events[-1]["response"]["output"] == done
    pieces = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert pieces == ["x"]


@pytest.mark.parametrize(
    "given",
    [
        answer("a"),
        answer(""),
        answer("a", finish="length"),
        answer("", finish="length", reasoning="r"),
        answer("a ☀", ToolCall("c", "look", "{}"), finish="tool_calls", reasoning="r"),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}],
)
def test_answers_fit_the_official_types(given: Answer, fields: dict[str, Any]) -> None:
    """An answer, and the events of the same answer, pass strict validation and hold the same items."""
    request = parse("a", tools=TOOLS, metadata={"k": "v"}, temperature=0.5, **fields)
    whole = DIALECT.answer(request, [given])
    response = Response.model_validate(whole, strict=True)
    assert (response.id, response.output_text) == (f"resp_{HEX}", given.message.content)
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 2, 7)
    assert (response.metadata, response.temperature, whole["store"]) == ({"k": "v"}, 0.5, fields.get("store", True))
    cut = given.finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details is not None) == cut
    events = streamed(request, given)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{response.status}"
    same = {name: value for name, value in whole.items() if name not in ("created_at", "completed_at")}
    assert {**events[-1]["response"], **same} == events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    (back,) = parse(whole["output"]).messages
    served = given.message
    assert (back.content, back.reasoning, back.anchor) == (served.content, served.reasoning, HEX)
    assert back.canonical() == served.canonical()


def test_reasoning_is_shown_as_it_was_asked_for() -> None:
    """Reasoning is its own summary where one is asked for, and plain text otherwise; sealed, it comes back whole."""
    given = answer("a", reasoning="r")
    plain = DIALECT.answer(parse("a"), [given])["output"][0]
    assert (plain["summary"], plain["content"]) == ([], [{"type": "reasoning_text", "text": "r"}])
    assert "encrypted_content" not in plain
    sealed = parse("a", reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    item = DIALECT.answer(sealed, [given])["output"][0]
    assert (item["summary"], "content" in item) == ([{"type": "summary_text", "text": "r"}], False)
    only = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    assert parse([only]).messages == (Message("assistant", reasoning="r", anchor=HEX),)


def test_logprobs() -> None:
    """Log-probabilities of every sampled token are in the answer, and in the stream once they are known."""
    request = parse("a", tools=TOOLS, include=["message.output_text.logprobs"])
    given = answer("a☀", ToolCall("c", "look", "{}"), token_texts=("a", "☀"), logprobs=(-0.5, -1.0))
    whole = Response.model_validate(DIALECT.answer(request, [given]), strict=True)
    tokens = whole.output[0].content[0].logprobs
    assert [(token.token, token.logprob, token.bytes) for token in tokens][1] == ("☀", -1.0, list("☀".encode()))
    stream = DIALECT.open_stream(request, given.id)
    events = [*stream.text("a☀"), *stream.call(given.message.tool_calls[0]), *stream.finish([given])]
    done = next(event for event in events if b"event: response.output_text.done" in event)
    assert b'"logprob":-1.0' in done
    assert sum(b"event: response.function_call_arguments.done" in event for event in events) == 1


def test_text_after_a_call_is_an_item_of_its_own() -> None:
    """What a stream could not know when it closed the message still arrives, and the items still agree."""
    request = parse("a", tools=TOOLS)
    given = answer("before after", ToolCall("c", "look", "{}"), finish="tool_calls")
    stream = DIALECT.open_stream(request, given.id)
    raw = [*stream.start(5), *stream.text("before"), *stream.call(given.message.tool_calls[0])]
    raw += [*stream.finish([given]), *stream.last([given])]
    events = [orjson.loads(event.partition(b"data: ")[2]) for event in raw]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == [f"msg_{HEX}", f"fc_{HEX}_0", f"msg_{HEX}_1"]
    assert events[-1]["response"]["output"] == done
    assert len(parse(done).messages) == 1


def test_a_stream_that_breaks_off() -> None:
    """The last event is a failed response with a code that clients know, numbered on from the others."""
    stream = DIALECT.open_stream(parse("a"), f"cmp-{HEX}")
    sent = [*stream.start(5), *stream.text("a")]
    codes = [(400, "context_length_exceeded"), (429, "engine_busy"), (502, "engine_error")]
    for extra, (status, code) in enumerate(codes):
        raw = stream.broken(DIALECT, status, code, "the sentence")
        event = orjson.loads(raw.partition(b"data: ")[2])
        assert raw.startswith(b"event: response.failed\n")
        assert (event["sequence_number"], event["response"]["status"]) == (len(sent) + extra, "failed")
        known = ["context_length_exceeded", "rate_limit_exceeded", "server_error"][extra]
        assert event["response"]["error"] == {"code": known, "message": "the sentence"}


def test_a_conversation_that_is_only_named() -> None:
    """What a request names is put in its place: input, output, and then what is new; instructions stay behind."""
    first = {"model": "m", "input": "a", "instructions": "be brief", "tools": [LOOK]}
    found = {f"resp_{HEX}": earlier(first, answer("", ToolCall(f"call_{HEX}_0", "look", "{}"), reasoning="r"))}
    body = {"model": "m", "previous_response_id": f"resp_{HEX}", "input": [output(0, "sunny")]}
    assert DIALECT.cites(body) == [f"resp_{HEX}"]
    whole = DIALECT.whole(body, {}, found)
    messages = DIALECT.parse(whole, {}).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert (messages[1].anchor, messages[1].reasoning) == (HEX, "r")
    assert whole["previous_response_id"] == f"resp_{HEX}"


def test_items_that_are_only_named() -> None:
    """A reference stands for the item of a stored answer, or of this very input."""
    found = {
        f"fc_{HEX}_0": earlier({"model": "m", "input": "a", "tools": [LOOK]}, answer("", ToolCall("c", "look", "{}")))
    }
    items = [text("user", "a"), {"type": "item_reference", "id": f"fc_{HEX}_0"}, output(0, "sunny")]
    body = {"model": "m", "input": items}
    assert DIALECT.completion_id(DIALECT.cites(body)[0]) == f"cmp-{HEX}"
    whole = DIALECT.whole(body, {}, found)
    assert whole["input"][1]["type"] == "function_call"
    with pytest.raises(BadRequest, match="store: true"):
        DIALECT.whole(body, {}, {})
    twice = [{**text("user", "a"), "id": "x"}, {"id": "x"}]
    assert DIALECT.whole({"model": "m", "input": twice}, {}, {})["input"] == [twice[0], twice[0]]


def test_what_was_not_to_be_stored_is_not_there() -> None:
    """A response that was asked for with store: false cannot be continued, referred to or fetched."""
    found = earlier({"model": "m", "input": "a", "store": False}, answer("b"))
    body = {"model": "m", "input": "c", "previous_response_id": f"resp_{HEX}"}
    for cited in ({}, {f"resp_{HEX}": found}):
        with pytest.raises(BadRequest) as caught:
            DIALECT.whole(body, {}, cited)
        assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")
        assert caught.value.field == "previous_response_id"
    for kind in ("response", "forget", "input_items", "cancel"):
        for absent in (found, None):
            with pytest.raises(BadRequest) as caught:
                DIALECT.recorded(kind, f"resp_{HEX}", absent, {})
            assert caught.value.status == 404


def test_stored_responses() -> None:
    """A stored response is shown as it was given; its input has ids and can be paged; it cannot be cancelled."""
    items = ["a", {"role": "assistant", "content": "b"}, call(0, id=None), output(0, "c")]
    stored = earlier({"model": "m", "input": [text("user", "a"), *items[1:]]}, answer("d"))
    id_ = f"resp_{HEX}"
    assert Response.model_validate(DIALECT.recorded("response", id_, stored, {}), strict=True).output_text == "d"
    assert DIALECT.recorded("forget", id_, stored, {}) == {"id": id_, "object": "response", "deleted": True}
    listed = DIALECT.recorded("input_items", id_, stored, {"order": "asc", "limit": "3"})
    page = ResponseItemList.model_validate(listed)
    assert [item.type for item in page.data] == ["message", "message", "function_call"]
    assert (page.has_more, page.first_id, page.last_id) == (True, "item_0", "item_2")
    rest = DIALECT.recorded("input_items", id_, stored, {"order": "asc", "after": "item_2"})
    assert [item["type"] for item in rest["data"]] == ["function_call_output"]
    newest = DIALECT.recorded("input_items", id_, stored, {"limit": "1"})
    assert newest["data"] == rest["data"]
    with pytest.raises(BadRequest, match="not made in the background"):
        DIALECT.recorded("cancel", id_, stored, {})
    with pytest.raises(BadRequest, match="streamed"):
        DIALECT.recorded("response", id_, stored, {"stream": "true"})


def test_compaction() -> None:
    """A conversation is answered with the user's messages and a sealed summary, which the next request reads."""
    body = {"model": "m", "input": [text("user", "a"), {"role": "assistant", "content": "b"}], "instructions": "i"}
    whole = DIALECT.whole(body, {"operation": "compact"}, {})
    request = DIALECT.parse(whole, {})
    assert request.messages[-1] == Message("user", SUMMARISE)
    assert request.tool_choice == "none"
    compacted = DIALECT.answer(request, [answer("so far", reasoning="r")])
    kept, item = compacted["output"]
    # The package's type has no place for the user's messages, which its own documentation promises.
    assert CompactedResponse.model_validate({**compacted, "output": [item]}, strict=True).output[0].type == "compaction"
    assert (kept["role"], kept["content"]) == ("user", [{"type": "input_text", "text": "a"}])
    again = parse([*compacted["output"], text("user", "go on")])
    assert [message.content for message in again.messages] == ["a", f"{SUMMARY}so far", "go on"]
    found = {f"resp_{HEX}": Earlier(orjson.dumps(whole), orjson.dumps(compacted))}
    on = DIALECT.whole({"model": "m", "previous_response_id": f"resp_{HEX}", "input": "go on"}, {}, found)
    assert parse(on["input"]).messages == again.messages


def test_compaction_inside_a_response() -> None:
    """A trigger at the end of the input asks for the sealed summary alone; nothing of it is streamed before."""
    request = parse([text("user", "a"), {"type": "compaction_trigger"}], tools=TOOLS, stream=True)
    given = answer("so far", reasoning="r")
    (item,) = DIALECT.answer(request, [given])["output"]
    assert (item["type"], item["id"]) == ("compaction", f"cmp_{HEX}")
    stream = DIALECT.open_stream(request, given.id)
    assert [*stream.reasoning("r"), *stream.text("so far")] == []
    events = streamed(request, given)
    assert "so far" not in str(events)
    assert events[-1]["response"]["output"] == [item]
    past = parse([text("user", "a"), {"type": "compaction_trigger"}, item])
    assert [message.content for message in past.messages] == ["a", f"{SUMMARY}so far"]


def test_counting() -> None:
    """A prompt is counted without a model's name, and the answer is the official one."""
    assert DIALECT.parse({"input": "a"}, {"operation": "count"}).model == ""
    counted = InputTokenCountResponse.model_validate(DIALECT.counted(7), strict=True)
    assert counted.input_tokens == 7


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_error_shape(status: int) -> None:
    """Errors have OpenAI's four fields."""
    assert set(DIALECT.error(status, "c", "m")["error"]) == {"message", "type", "param", "code"}
