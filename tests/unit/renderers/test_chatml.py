"""ChatML's own reading: what is a call, what only looks like one, and what is shown when."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.messages import Tool, ToolCall
from polar.renderers import for_folder
from polar.renderers.chatml import split_calls
from polar.renderers.layout import held_back

MODEL = Path(__file__).parents[3] / "polar" / "tiny_engine" / "model"
TOOLS = (Tool("f"),)


@pytest.mark.parametrize(
    "written",
    ['{"a":1}', '{ "a" : 1.0 }', '{"b": {}, "a": []}', "{}", '{"s": "</tool_call>"}', '{"s": "\\u00e9"}'],
)
def test_arguments_are_served_as_written(written: str) -> None:
    """Arguments keep the spacing, order and number forms that the model wrote."""
    text, calls, malformed = split_calls(f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>')
    assert (text, [(call.name, call.arguments) for call in calls], malformed) == ("", [("f", written)], False)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "{}",
        '{"name": "f", "arguments": [1]}',
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {}',
        '{"name": "f" "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        "[" * 100_000,
        '{"name": "f", "arguments": {}} x',
    ],
)
def test_malformed_calls_stay_text(written: str) -> None:
    """What is no call is neither dropped nor mended: it stays text, and is flagged."""
    text = f"so: <tool_call>\n{written}\n</tool_call>"
    assert split_calls(text) == (text, [], True)


def test_calls_among_text() -> None:
    """Text around calls is kept, the space between them is not."""
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text, calls, malformed = split_calls(f"a \n{one}\n{one}\n b\n")
    assert (text, len(calls), malformed) == ("a\n b", 2, False)


def test_no_tools_no_calls() -> None:
    """A harness that offered no tools is never sent a call."""
    renderer = for_folder(MODEL)
    ids = renderer.vocabulary.encode(['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'])
    assert renderer.parse(ids, ()).message.tool_calls == ()
    assert len(renderer.parse(ids, TOOLS).message.tool_calls) == 1


def test_unclosed_reasoning() -> None:
    """Reasoning that was cut off is reasoning still, and flagged."""
    renderer = for_folder(MODEL)
    parsed = renderer.parse(renderer.vocabulary.encode(["<think>\nhm"]), TOOLS)
    assert (parsed.message.reasoning, parsed.message.content, parsed.flags) == ("hm", "", ("unclosed_reasoning",))


def test_shown_as_it_comes() -> None:
    """Reasoning and text are shown token by token, and each call as soon as it is closed."""
    renderer = for_folder(MODEL)
    pieces = renderer.pieces(TOOLS)
    text = "<think>\na b\n</think>\n\nc ☀ d < e\n"
    calls = ['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', '<tool_call>\n{"name": "g"}\n</tool_call>']
    shown = []
    for part in (text, *calls, "<|im_end|>"):
        shown.append([piece for token in renderer.vocabulary.plain(part) for piece in pieces.feed([token])])
    assert "".join(piece[1] for piece in shown[0] if piece[0] == "reasoning") == "a b"
    assert "".join(piece[1] for piece in shown[0] if piece[0] == "text") == "c ☀ d < e"
    assert shown[1:] == [[ToolCall("", "f", "{}")], [ToolCall("", "g", "{}")], []]


@pytest.mark.parametrize(
    ("text", "count"), [("a", 0), ("a<", 1), ("a<tool_", 6), ("<tool_call", 10), ("<x", 0), ("", 0)]
)
def test_held_back(text: str, count: int) -> None:
    """Only what might begin a mark waits."""
    assert held_back(text, ("<tool_call>",)) == count
