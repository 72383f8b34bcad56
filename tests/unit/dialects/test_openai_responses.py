"""OpenAI Responses: items of every kind become messages."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar.dialects import seals
from polar.dialects.base import BadRequest
from polar.dialects.responses_input import LOST_SUMMARY, SUMMARY
from polar.messages import Message, ToolCall
from tests.unit.dialects.responses_rig import (
    DIALECT,
    GROUP,
    HEX,
    LOOK,
    OTHER,
    TOOLS,
    answer,
    call,
    output,
    parse,
    text,
)


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
