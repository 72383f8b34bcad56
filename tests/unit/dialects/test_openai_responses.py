"""OpenAI Responses: items of every kind become messages, and answers pass the openai package's own types."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.responses import CompactedResponse, Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter

from polar.dialects import seals
from polar.dialects.base import BadRequest, Earlier
from polar.dialects.openai_responses import SUMMARISE, OpenAIResponses
from polar.dialects.responses_input import LOST_SUMMARY, SUMMARY
from polar.messages import Answer, FinishReason, Message, ModelRequest, ToolCall

DIALECT = OpenAIResponses()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HEX, OTHER = "0123456789abcdef01234567", "89abcdef0123456789abcdef"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
GROUP = {"type": "namespace", "name": "team", "description": "Others.", "tools": [{"type": "function", "name": "ask"}]}
BUILT_IN = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
TOOLS = [LOOK, PATCH, GROUP, *BUILT_IN]


def parse(items: Any, **fields: Any) -> ModelRequest:
    """A request with this input."""
    return DIALECT.parse({"model": "m", "input": items, **fields}, {})


def text(role: str, said: str) -> dict[str, Any]:
    """A message item."""
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": said}]}


def call(index: int, completion: str = HEX, **fields: Any) -> dict[str, Any]:
    """A function call item of one of our answers."""
    ids = {"id": f"fc_{completion}_{index}", "call_id": f"call_{completion}_{index}"}
    return {"type": "function_call", **ids, "name": "look", "arguments": "{}", **fields}


def output(index: int, said: Any, completion: str = HEX, kind: str = "function_call") -> dict[str, Any]:
    """What a tool answered to it."""
    return {"type": f"{kind}_output", "call_id": f"call_{completion}_{index}", "output": said}


def answer(said: str = "", *calls: ToolCall, finish: FinishReason = "stop", **fields: Any) -> Answer:
    """An answer of completion HEX."""
    reasoning = fields.pop("reasoning", None)
    return Answer(f"cmp-{HEX}", "m", Message("assistant", said, reasoning, calls), finish, 5, 2, 1, **fields)


def streamed(request: ModelRequest, given: Answer) -> list[dict[str, Any]]:
    """The events of an answer, each of them valid, numbered and named."""
    stream = DIALECT.open_stream(request, given.id)
    events = []
    for number, raw in enumerate([*stream.finish([given]), *stream.last([given])]):
        name, data = raw.decode().removesuffix("\n\n").split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        EVENT.validate_python(event, strict=True)
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (text("user", "a"), Message("user", "a")),
        ({"role": "user", "content": "a"}, Message("user", "a")),
        (text("developer", "a"), Message("system", "a")),
        (text("system", "a"), Message("system", "a")),
        ({"role": "assistant", "content": "a"}, Message("assistant", "a")),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            Message("assistant", "no"),
        ),
        (
            {"type": "message", "id": f"msg_{HEX}", "role": "assistant", "content": "a"},
            Message("assistant", "a", anchor=HEX),
        ),
        (
            {"type": "reasoning", "id": f"rs_{HEX}", "summary": [{"type": "summary_text", "text": "r"}]},
            Message("assistant", reasoning="r", anchor=HEX),
        ),
        (
            {"type": "reasoning", "summary": [], "encrypted_content": seals.seal(f"cmp-{HEX}", "deep")},
            Message("assistant", reasoning="deep", anchor=HEX),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
            Message("assistant", tool_calls=(ToolCall("c", "patch", '{"input":"x"}'),)),
        ),
        (
            call(0, namespace="team", id=None),
            Message("assistant", tool_calls=(ToolCall(f"call_{HEX}_0", "team__look", "{}"),)),
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            Message("assistant", tool_calls=(ToolCall("c", "local_shell", '{"command":["ls"]}'),)),
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "timeout_ms": None}},
            Message("assistant", tool_calls=(ToolCall("c", "shell", '{"commands":["ls"]}'),)),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "p"}},
            Message("assistant", tool_calls=(ToolCall("c", "apply_patch", '{"type":"delete_file","path":"p"}'),)),
        ),
        (
            {"type": "computer_call", "call_id": "c", "action": {"type": "wait"}},
            Message("assistant", tool_calls=(ToolCall("c", "computer", '{"type":"wait"}'),)),
        ),
        (output(0, "done"), Message("tool", "done", tool_call_id=f"call_{HEX}_0")),
        (
            {"type": "local_shell_call_output", "id": "c", "output": "done"},
            Message("tool", "done", tool_call_id="c"),
        ),
        (
            {
                "type": "shell_call_output",
                "call_id": "c",
                "output": [
                    {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                    {"stdout": "", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}},
                    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
                ],
            },
            Message("tool", "a\nb\n[exit code 2]\n[timed out]", tool_call_id="c"),
        ),
        (
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no"},
            Message("tool", "no", tool_call_id="c", is_error=True),
        ),
        (
            {"type": "compaction", "encrypted_content": seals.seal(f"cmp-{HEX}", "so far")},
            Message("user", f"{SUMMARY}so far"),
        ),
    ],
)
def test_items(item: dict[str, Any], message: Message) -> None:
    """Every kind of item comes out as the message that it is."""
    assert parse([item]).messages == (message,)


def test_instructions_come_first() -> None:
    """Instructions are the system's, before whatever the input begins with."""
    assert parse("b", instructions="a").messages == (Message("system", "a"), Message("user", "b"))


def test_one_completion_is_one_message() -> None:
    """Reasoning, text and calls that stand together are one message of the assistant."""
    items = [
        text("user", "a"),
        {"type": "reasoning", "id": f"rs_{HEX}", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        call(0),
        call(1),
        output(0, "0"),
        output(1, "1"),
    ]
    messages = parse(items).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool"]
    assert (messages[1].content, messages[1].reasoning, messages[1].anchor) == ("t", "r", HEX)
    assert [each.id for each in messages[1].tool_calls] == [f"call_{HEX}_0", f"call_{HEX}_1"]


def test_interleaved_results_come_after_their_completion() -> None:
    """Calls of one answer are one message, also where a client put each result behind its call."""
    for fields in ({}, {"id": None}):
        items = [call(0, **fields), output(0, "0"), call(1, **fields), output(1, "1"), call(0, OTHER, **fields)]
        messages = parse(items).messages
        assert [message.role for message in messages] == ["assistant", "tool", "tool", "assistant"]
        assert len(messages[0].tool_calls) == 2
        assert [message.content for message in messages[1:3]] == ["0", "1"]


def test_neighbours_of_two_completions_stay_two() -> None:
    """Two answers in a row, as after one that was cut off, are not taken for one."""
    items = [{"role": "assistant", "content": "a", "id": f"msg_{each}"} for each in (HEX, OTHER)]
    assert [message.anchor for message in parse(items).messages] == [HEX, OTHER]


def test_results_with_pictures_and_files() -> None:
    """Parts of a result keep their places; what cannot be seen is said and marked."""
    parts = [
        {"type": "input_text", "text": "before"},
        {"type": "input_image", "image_url": "data:image/png;base64,QUJD", "detail": "auto"},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,QUJD"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "input_smell"},
    ]
    request = parse([call(0), output(0, parts)])
    message = request.messages[1]
    (image,) = message.images
    assert message.content[image.start : image.end] == "[image: image/png, 3 bytes]"
    assert "[document: a.txt]\nABC" in message.content
    assert request.marks == ("content_unread", "unknown_part:input_smell")


def test_what_only_a_provider_understands_is_marked() -> None:
    """Traces of provider tools are words, unknown kinds are marks, and neither is an error."""
    items = [
        text("user", "a"),
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}},
        {"type": "compaction", "encrypted_content": "somebody else's"},
        {"type": "brand_new", "payload": [1]},
    ]
    request = parse(items)
    assert '"query":"q"' in request.messages[1].content
    assert request.messages[2] == Message("user", LOST_SUMMARY)
    assert request.marks == ("foreign_item:web_search_call", "summary_unread", "unknown_item:brand_new")


def test_tools_that_come_with_the_input() -> None:
    """Tools that were found on the way are offered from then on."""
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [LOOK]},
        {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c", "tools": [GROUP]},
        text("user", "a"),
    ]
    request = parse(items)
    assert [tool.name for tool in request.tools] == ["look", "team__ask"]
    assert request.messages[1].content == "Tools found: team"


def test_tools() -> None:
    """What a client runs is offered as a function under its own name; the rest is marked."""
    search = {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": {"type": "object"}}
    hosted = [{"type": "web_search"}, {"type": "shell", "environment": {"type": "container_auto"}}]
    request = parse("a", tools=[*TOOLS, search, *hosted])
    names = ["look", "patch", "team__ask", "local_shell", "shell", "apply_patch", "tool_search"]
    assert [tool.name for tool in request.tools] == names
    assert request.tools[0].raw == {"name": "look", "description": "", "parameters": LOOK["parameters"]}
    assert "lark" in str(request.tools[1].parameters)
    assert (request.tools[2].wire_name, request.tools[2].namespace) == ("ask", "team")
    assert request.marks == ("tool_unavailable:web_search", "tool_unavailable:shell")


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "look"}, "look"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "ask", "namespace": "team"}, "team__ask"),
        ({"type": "shell"}, "shell"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}, "required"),
    ],
)
def test_tool_choice(chosen: Any, name: str) -> None:
    """A choice names the tool as the model knows it."""
    assert parse("a", tools=TOOLS, tool_choice=chosen).tool_choice == name


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


def test_sampling_and_marks() -> None:
    """What can be honoured is sampling, and what cannot is a mark."""
    request = parse(
        "a",
        tools=TOOLS,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        parallel_tool_calls=False,
        truncation="auto",
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}, "verbosity": "low"},
        reasoning={"effort": "low"},
        tool_choice={"type": "function", "name": "look"},
        client_metadata={"x": "y"},
    )
    asked = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "json_schema": '{"type":"array"}'}
    assert request.sampling.asked() == asked
    assert request.marks == ("parallel_tool_calls", "truncation", "verbosity", "reasoning_effort", "tool_choice")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"type": "message", "role": "wizard"}]}, "input[0].role"),
        ({"input": [text("user", "a"), {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
        ({"input": [{"role": "user", "content": [{"text": "a"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"model": None}, "model"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": "all"}, "include"),
        ({"store": "no"}, "store"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_refusals(fields: dict[str, Any], field: str) -> None:
    """What cannot be honoured is refused by the name of the field."""
    with pytest.raises(BadRequest) as caught:
        DIALECT.parse({"model": "m", "input": "a", **fields}, {})
    assert caught.value.field == field
    assert field in caught.value.message


ITEMS = [
    text("user", "a"),
    call(0),
    output(0, "a"),
    {"type": "reasoning", "id": "r", "summary": [], "content": [], "encrypted_content": ""},
    {"type": "shell_call_output", "call_id": "c", "output": []},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "u"}},
    {"type": "local_shell_call", "call_id": "c", "id": "i", "action": {}},
    {"type": "apply_patch_call", "call_id": "c", "operation": {}},
    {"type": "tool_search_output", "call_id": "c", "tools": [LOOK]},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "mcp_call", "name": "n", "arguments": "{}"},
    {"type": "additional_tools", "tools": []},
]


@pytest.mark.parametrize("value", ["x", 3, [1], {"a": 1}, True, 1.5, [[]], [None], [{}], None])
def test_nothing_but_refusals_escapes(value: Any) -> None:
    """Whatever stands in a field, it is read or refused by name, in the body and in every kind of item."""
    bodies: list[dict[str, Any]] = [
        {"model": "m", "input": "a", name: value}
        for name in (
            "reasoning",
            "text",
            "include",
            "metadata",
            "instructions",
            "previous_response_id",
            "max_tool_calls",
        )
    ]
    bodies += [{"model": "m", "input": [{**item, name: value}]} for item in ITEMS for name in [*item, "namespace"]]
    bodies += [{"model": "m", "input": "a", "tools": [{**tool, name: value}]} for tool in TOOLS for name in tool]
    for body in bodies:
        try:
            DIALECT.whole(body, {}, {})
            request = DIALECT.parse(body, {})
            orjson.dumps(DIALECT.answer(request, [answer("a", reasoning="r")]))
        except BadRequest as error:
            assert error.status == 400
            assert error.field
            assert error.field.partition("[")[0].partition(".")[0] in error.message


def earlier(body: dict[str, Any], given: Answer) -> Earlier:
    """A recorded call."""
    answered = DIALECT.answer(DIALECT.parse(body, {}), [given])
    return Earlier(orjson.dumps(body), orjson.dumps(answered))


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
