"""Anthropic Messages: what its clients send, and what the model is shown of it."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import BadRequest, Earlier
from polar.dialects.seals import seal
from polar.messages import Message, ModelRequest, ToolCall

DIALECT = AnthropicMessages()
ID = "cmp-0123456789abcdef01234567"
NAME = ID.removeprefix("cmp-")
CALL = ToolCall(f"call_{NAME}_0", "look", '{"b": 1, "a": [2]}')
USER = {"role": "user", "content": "a"}
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


def parse(messages: list[Any], **fields: Any) -> ModelRequest:
    """A request with these messages."""
    return DIALECT.parse({"model": "m", "max_tokens": 7, "messages": messages, **fields}, {})


def text(value: str) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": value}


def test_user_blocks_become_messages() -> None:
    """Tool results stand alone, in order, with the text around them in its place; one role's entries are one turn."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("x"), text("y")], "is_error": True}
    plain = {"type": "tool_result", "tool_use_id": "u", "content": "z", "cache_control": {"type": "ephemeral"}}
    request = parse(
        [
            {"role": "user", "content": [text("a"), text("b")]},
            USER,
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": [result, plain, text("d")]},
            {"role": "system", "content": [text("e")], "output_config": {"effort": "low"}},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "v"}]},
        ],
        system=[text("s"), {**text("t"), "cache_control": {"type": "ephemeral"}}],
    )
    assert request.messages == (
        Message("system", "s\nt"),
        Message("user", "a\nb\na"),
        Message("assistant", "c"),
        Message("tool", "x\ny", tool_call_id="t", is_error=True),
        Message("tool", "z", tool_call_id="u"),
        Message("user", "d"),
        Message("system", "e"),
        Message("tool", "", tool_call_id="v"),
    )
    assert request.marks == ()


def test_cache_control_and_form_change_nothing() -> None:
    """The same conversation is the same whatever its blocks are marked with, and as text or as a block."""
    marked = {**text("a"), "cache_control": {"type": "ephemeral"}, "citations": None}
    one, other = parse([USER], tools=[LOOK]), parse([{"role": "user", "content": [marked]}], tools=[LOOK])
    cached = parse([USER], tools=[{**LOOK, "cache_control": {"type": "ephemeral"}, "strict": True}])
    assert one.messages == other.messages
    assert one.fingerprint() == other.fingerprint() == cached.fingerprint()


def test_assistant_blocks_become_one_message() -> None:
    """Thinking, text and calls of entries that stand side by side are one turn, with the arguments as JSON."""
    thinking = {"type": "thinking", "thinking": "r", "signature": seal(ID)}
    use = {"type": "tool_use", "id": CALL.id, "name": "look", "input": {"b": 1}}
    entries = [{"role": "assistant", "content": [thinking, text("c")]}, {"role": "assistant", "content": [use]}]
    (_, message) = parse([USER, *entries]).messages
    assert message == Message("assistant", "c", "r", (ToolCall(CALL.id, "look", '{"b":1}'),), anchor=NAME)


def test_answers_that_stand_side_by_side_stay_apart() -> None:
    """Two answers of ours are not merged, for the second would be lost behind the first's id."""
    other = "f" * 24
    one = {"role": "assistant", "content": [{"type": "thinking", "thinking": "r", "signature": seal(ID)}, text("c")]}
    two = {"role": "assistant", "content": [{"type": "tool_use", "id": f"call_{other}_0", "name": "look"}]}
    messages = parse([USER, one, two]).messages
    assert [message.role for message in messages] == ["user", "assistant", "assistant"]
    assert [len(message.tool_calls) for message in messages] == [0, 0, 1]


@pytest.mark.parametrize(
    ("block", "reasoning", "anchor"),
    [
        ({"type": "thinking", "thinking": "r", "signature": seal(ID)}, "r", NAME),
        ({"type": "thinking", "thinking": "", "signature": seal(ID, "deep ☀")}, "deep ☀", NAME),
        ({"type": "thinking", "thinking": "", "signature": seal(ID)}, None, NAME),
        ({"type": "thinking", "thinking": "r", "signature": "EqoBCkgIARAB"}, "r", None),
        ({"type": "thinking", "thinking": "r"}, "r", None),
        ({"type": "redacted_thinking", "data": seal(ID, "deep")}, "deep", NAME),
        ({"type": "redacted_thinking", "data": "EqoBCkgIARAB"}, None, None),
    ],
)
def test_thinking_comes_back(block: dict[str, Any], reasoning: str | None, anchor: str | None) -> None:
    """A signature of ours names the completion, and holds the reasoning where none was shown; others are left alone."""
    (_, message) = parse([USER, {"role": "assistant", "content": [block, text("c")]}]).messages
    assert (message.content, message.reasoning, message.anchor) == ("c", reasoning, anchor)


def test_billing_line_is_left_out() -> None:
    """The line that changes with each turn of Claude Code is not for the model."""
    line = text("x-anthropic-billing-header: cc_version=2; cch=abc;")
    request = parse([USER], system=[line, text("s")])
    assert request.messages == parse([USER], system="s").messages
    assert request.marks == ("billing_header",)
    assert parse([USER], system=line["text"] + "\ns").messages == request.messages
    assert parse([USER], system=[line]).messages == (Message("user", "a"),)


PDF = base64.b64encode(b"%PDF-1.7").decode()
FILE = base64.b64encode("plain ☀".encode()).decode()


@pytest.mark.parametrize(
    ("block", "shown", "marks"),
    [
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
            "[image: image/png, 3 bytes]",
            (),
        ),
        ({"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}, "[image: http://x/a.png]", ()),
        (
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "[image: file f; its content cannot be shown here]",
            ("content_unread",),
        ),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
            "[document: untitled, application/pdf; its content cannot be shown here]",
            ("content_unread",),
        ),
        (
            {"type": "document", "title": "T", "source": {"type": "base64", "media_type": "text/plain", "data": FILE}},
            "[document: T]\nplain ☀",
            (),
        ),
        (
            {"type": "document", "context": "C", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
            "C\n[document: untitled]\nd",
            (),
        ),
        (
            {"type": "document", "title": "T", "source": {"type": "content", "content": [text("d")]}},
            "[document: T]\nd",
            (),
        ),
        (
            {"type": "document", "title": "T", "source": {"type": "url", "url": "http://x/a.pdf"}},
            "[document: T, http://x/a.pdf; its content cannot be shown here]",
            ("content_unread",),
        ),
        (
            {"type": "search_result", "title": "T", "source": "http://x", "content": [text("d")]},
            "[search result: T, http://x]\nd",
            (),
        ),
        ({"type": "tool_reference", "tool_name": "look"}, "[tool: look]", ()),
        (
            {"type": "container_upload", "file_id": "f"},
            "[uploaded file f; its content cannot be shown here]",
            ("content_unread",),
        ),
        ({"type": "compaction", "content": "so far", "signature": "x"}, "so far", ()),
        (
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
            '[server_tool_use: {"id":"srvtoolu_1","name":"web_search","input":{"query":"q"}}]',
            ("block_as_words",),
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "zzz"}],
            },
            '[web_search_tool_result: {"tool_use_id":"s","content":[{"title":"T","url":"u"}]}]',
            ("block_as_words",),
        ),
        ({"type": "mcp_tool_use", "name": "n"}, '[mcp_tool_use: {"name":"n"}]', ("block_as_words",)),
        ({"type": "of_next_year", "x": 1}, '[of_next_year: {"x":1}]', ("block_as_words",)),
    ],
)
@pytest.mark.parametrize("place", ["user", "assistant", "tool"])
def test_blocks_are_shown_or_marked(place: str, block: dict[str, Any], shown: str, marks: tuple[str, ...]) -> None:
    """Every kind of block, wherever it stands, is shown to the model, or stands there in words and is marked."""
    blocks = [text("before"), block, text("after")]
    entry: dict[str, Any] = {"role": place, "content": blocks}
    if place == "tool":
        entry = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]}
    request = parse([USER, {"role": "assistant", "content": ""}, USER, {"role": "assistant", "content": "x"}, entry])
    message = request.messages[-1]
    assert message.content.removeprefix("x\n") == f"before\n{shown}\nafter"
    assert tuple(mark for mark in request.marks if mark != "prefill") == marks
    for image in message.images:
        assert message.content[image.start : image.end] == shown


def test_tools_with_a_schema() -> None:
    """A client's tool is offered in the form that templates print, without what is for Anthropic alone."""
    (tool,) = parse([USER], tools=[{**LOOK, "type": "custom", "strict": True, "input_examples": [{}]}]).tools
    assert tool.raw == {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert tool.kind == "function"


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [
        ("bash_20250124", "bash", "restart"),
        ("text_editor_20250124", "str_replace_editor", "new_str"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text"),
        ("computer_20241022", "computer", "coordinate"),
        ("computer_20251124", "computer", "scroll_amount"),
        ("memory_20250818", "memory", "new_path"),
    ],
)
def test_tools_that_anthropic_defines(kind: str, name: str, parameter: str) -> None:
    """A tool that the client executes by a dated contract is a function with that contract's parameters."""
    size = {"display_width_px": 800, "display_height_px": 600} if name == "computer" else {}
    request = parse([USER], tools=[{"type": kind, "name": name, "enable_zoom": True, **size}])
    (tool,) = request.tools
    assert (tool.name, request.marks) == (name, ())
    assert parameter in tool.parameters["properties"]
    assert set(tool.parameters["required"]) <= tool.parameters["properties"].keys()
    assert tool.raw["parameters"] == tool.parameters
    assert tool.description
    editing = tool.parameters["properties"].get("command", {}).get("enum", [])
    assert ("undo_edit" in editing) == (kind == "text_editor_20250124")


FETCH = {"name": "fetch", "description": "Fetch.", "input_schema": {"type": "object"}, "defer_loading": True}
FUNCTION = '<function>{"name":"fetch","description":"Fetch.","parameters":{"type":"object"}}</function>'


def test_deferred_tools() -> None:
    """A tool that a search brings is described where it is brought; the head of the conversation stays as it was."""
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "fetch"}]}
    before = parse([USER], tools=[LOOK])
    after = parse(
        [USER, {"role": "assistant", "content": "c"}, {"role": "user", "content": [found]}], tools=[LOOK, FETCH]
    )
    assert after.tools == before.tools
    assert after.fingerprint() == before.fingerprint()
    assert (after.messages[-1].content, after.marks) == (FUNCTION, ())
    assert parse([USER], tools=[LOOK, FETCH], tool_choice={"type": "tool", "name": "fetch"}).tool_choice == "fetch"
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    assert [tool.name for tool in parse([USER], tools=[LOOK, FETCH, search]).tools] == ["look", "fetch"]


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        ({"type": "tool_definition", "definition": FETCH}, FUNCTION),
        ({"type": "tool_reference", "name": "look"}, "[tool: look]"),
        ({"type": "mcp_toolset_reference", "server_name": "s"}, '[tool: {"server_name":"s"}]'),
        ({"type": "tool_definition", "definition": {"type": "web_search_20250305", "name": "web_search"}}, ""),
    ],
)
def test_tools_that_come_in_mid_conversation(tool: dict[str, Any], shown: str) -> None:
    """A tool that a system message adds is described there; one that only a server executes is marked."""
    entry = {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}
    request = parse([USER, entry], tools=[LOOK])
    assert request.messages[-1] == Message("system", shown)
    assert [tool.name for tool in request.tools] == ["look"]
    marks = {'[tool: {"server_name":"s"}]': ("block_as_words",), "": ("tool_unavailable:web_search",)}
    assert request.marks == marks.get(shown, ())
    gone = {"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}]}
    assert parse([USER, gone], tools=[LOOK]).messages[-1].content == "[tool removed: look]"


def test_tools_of_anthropics_servers() -> None:
    """What only Anthropic's servers execute is not offered and said so; to force it is refused by its name."""
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    mcp = {"type": "mcp_toolset", "mcp_server_name": "files"}
    request = parse([USER], tools=[search, LOOK, mcp], tool_choice={"type": "auto"})
    assert [tool.name for tool in request.tools] == ["look"]
    assert request.marks == ("tool_unavailable:web_search", "tool_unavailable:files")
    with pytest.raises(BadRequest, match=r"tool_choice\.name: web_search .*servers.*look"):
        parse([USER], tools=[search, LOOK], tool_choice={"type": "tool", "name": "web_search"})
    with pytest.raises(BadRequest, match="web_search"):
        parse([USER], tools=[search], tool_choice={"type": "any"})


@pytest.mark.parametrize(
    ("given", "choice", "marks"),
    [
        (None, "auto", ()),
        ({"type": "auto"}, "auto", ()),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", ("disable_parallel_tool_use",)),
        ({"type": "any"}, "required", ("tool_choice",)),
        ({"type": "none"}, "none", ()),
        ({"type": "tool", "name": "look"}, "look", ("tool_choice",)),
    ],
)
def test_tool_choice(given: Any, choice: str, marks: tuple[str, ...]) -> None:
    """Each of Anthropic's choices."""
    request = parse([USER], tools=[LOOK], tool_choice=given)
    assert (request.tool_choice, request.marks) == (choice, marks)


def test_sampling_and_marks() -> None:
    """What can be honoured is sampling; what cannot is a mark; what changes no answer is neither."""
    schema = {"type": "object", "properties": {}}
    request = parse(
        [USER],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["x", "y"],
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        container="c",
        mcp_servers=[{"type": "url", "name": "n", "url": "http://x"}],
        service_tier="auto",
        metadata={"user_id": "{}"},
        stream=True,
    )
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 7, "stop": ("x", "y")}
    assert request.sampling.asked() == {**asked, "json_schema": orjson.dumps(schema).decode()}
    assert request.marks == ("container", "mcp_servers", "context_management", "thinking", "effort")
    assert request.stream
    older = parse([USER], output_format={"type": "json_schema", "schema": schema}, thinking={"type": "adaptive"})
    assert (older.sampling.json_schema, older.marks) == (request.sampling.json_schema, ())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "smell"}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages[1].content[0].name",
        ),
        ({"system": 3}, "system"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool", "name": "gone"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_refusals(fields: dict[str, Any], field: str) -> None:
    """What cannot be honoured is refused by the name of the field."""
    with pytest.raises(BadRequest) as caught:
        DIALECT.parse({"model": "m", "max_tokens": 7, "messages": [USER], **fields}, {})
    assert caught.value.field == field
    assert field in caught.value.message


def test_threads() -> None:
    """A turn that names the message before it is read with the conversation that it goes on with."""
    use = {"type": "tool_use", "id": CALL.id, "name": "look", "input": {}}
    asked = {"model": "m", "max_tokens": 7, "system": "s", "tools": [LOOK], "messages": [USER]}
    earlier = Earlier(orjson.dumps(asked), orjson.dumps({"content": [text("c"), use]}))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL.id, "content": "r"}]}
    turn = {"model": "m", "max_tokens": 9, "messages": [result]}
    turn["thread"] = {"type": "continue", "previous_message_id": "msg_1"}
    assert DIALECT.cites(turn) == ("msg_1",)
    request = DIALECT.parse(DIALECT.whole(turn, {}, {"msg_1": earlier}), {})
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "tool"]
    assert (request.tools[0].name, request.sampling.max_tokens) == ("look", 9)
    with pytest.raises(BadRequest, match="msg_1") as caught:
        DIALECT.whole(turn, {}, {})
    body = DIALECT.error(404, caught.value.code or "", caught.value.message)
    assert body["error"]["details"] == {"error_code": "thread_not_found"}
    begun = {**asked, "thread": {"type": "create"}}
    assert (DIALECT.cites(begun), DIALECT.whole(begun, {}, {})) == ((), begun)


def test_counting_needs_no_max_tokens() -> None:
    """A count is asked for without max_tokens; a message without it is refused in Anthropic's words."""
    (route,) = (route for route in DIALECT.routes if route.kind == "count")
    assert DIALECT.parse({"model": "m", "messages": [USER]}, route.fixed).sampling.max_tokens is None
    with pytest.raises(BadRequest, match="^max_tokens: Field required$"):
        DIALECT.parse({"model": "m", "messages": [USER]}, {})
    assert DIALECT.counted(5) == {"input_tokens": 5}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"x-api-key": "k"}, "k"),
        ({"authorization": "Bearer k"}, "k"),
        ({"x-api-key": "k", "authorization": "Bearer l"}, "k"),
        ({"x-api-key": " ", "authorization": "bearer l"}, "l"),
        ({"authorization": "Basic k"}, None),
        ({}, None),
    ],
)
def test_secret(headers: dict[str, str], key: str | None) -> None:
    """The key is where an API key or an auth token goes."""
    assert DIALECT.secret(headers, {}) == key
