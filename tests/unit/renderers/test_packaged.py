"""The library's families behind our interface: what is read, how turns are joined, and which family a folder wants."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.errors import HarnessError, SpecError
from polar.messages import Message, Tool, ToolCall
from polar.renderers import families, for_folder
from polar.renderers.base import Renderer
from polar.renderers.early import early_parts
from polar.renderers.families import PROBES
from polar.renderers.guard import MARK
from polar.renderers.packaged import LibraryRenderer, family_of
from polar.renderers.selftest import self_test
from tests.fakes.tokenizers import FAMILIES, HARMONY, MODEL, family_folder

LOOK = Tool("look", raw={"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}})
TOOLS = (LOOK,)
USER, MORE = (Message("user", "hi"),), (Message("user", "more"),)
RESULT = (Message("tool", "found", None, (), "call_0123456789abcdef01234567_0", "look"),)


@pytest.fixture
def qwen() -> LibraryRenderer:
    """Qwen3's layout on the tiny model's own tokenizer."""
    renderer = for_folder(MODEL, "qwen3")
    assert isinstance(renderer, LibraryRenderer)
    return renderer


def made(folder: Path, family: str) -> LibraryRenderer:
    """A family on a tokenizer that is made for it."""
    return LibraryRenderer(family_folder(folder / family, FAMILIES[family]), family)


def after(renderer: Renderer, written: str, appended: tuple[Message, ...]) -> tuple[int, str] | None:
    """What a bridge trims from a sampled text, and what it prints after it."""
    prompt = renderer.render(USER, TOOLS)
    output = renderer.vocabulary.template(written)  # type: ignore[attr-defined]
    bridge = renderer.bridge(output, appended, TOOLS, prompt)
    return bridge and (bridge.trim, renderer.decode(bridge.ids))


@pytest.mark.parametrize("written", ['{"a":1}', '{ "b" : 1.0,  "a": {} }', "{}", '{"s": "\\u00e9}"}', '"{\\"a\\": 1}"'])
def test_arguments_are_served_as_written(qwen: LibraryRenderer, written: str) -> None:
    """Where a family writes JSON, spacing, order and number forms stay the model's own."""
    text = f'so:<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call><|im_end|>'
    parsed = qwen.parse(qwen.vocabulary.template(text), TOOLS)
    (call,) = parsed.message.tool_calls
    assert (parsed.message.content, call.name, parsed.flags) == ("so:", "look", ())
    assert call.arguments == (json.loads(written) if written.startswith('"') else written)


@pytest.mark.parametrize(
    "body", ["{", '{"name": 1}', '{"name": "look", "arguments": [1]}', '{"arguments": {}}', "[" * 9999]
)
def test_malformed_calls_stay_text(qwen: LibraryRenderer, body: str) -> None:
    """What is no call is neither dropped nor mended: it stays text, and is flagged."""
    parsed = qwen.parse(qwen.vocabulary.template(f"so:<tool_call>{body}</tool_call>"), TOOLS)
    assert parsed.message.tool_calls == ()
    assert "malformed_tool_call" in parsed.flags
    assert f"<tool_call>{body}</tool_call>" in parsed.message.content


def test_arguments_in_tags_become_json(tmp_path: Path) -> None:
    """Families without JSON have their values read by the tool's own schema."""
    renderer = made(tmp_path, "glm-4.5")
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}
    tool = Tool("look", raw={"name": "look", "parameters": schema})
    call = "<arg_key>path</arg_key><arg_value>12</arg_value><arg_key>n</arg_key><arg_value>12</arg_value>"
    output = renderer.vocabulary.template(f"</think><tool_call>look\n{call}</tool_call><|observation|>")
    assert renderer.parse(output, (tool,)).message.tool_calls == (ToolCall("", "look", '{"path": "12", "n": 12}'),)


def test_no_tools_no_calls(qwen: LibraryRenderer) -> None:
    """A harness that offered no tools is sent the text of a call, and no flag."""
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    parsed = qwen.parse(qwen.vocabulary.template(text), ())
    assert (parsed.message.content, parsed.message.tool_calls, parsed.flags) == (text, (), ())


def test_reasoning_that_the_prompt_opened(tmp_path: Path) -> None:
    """A generation prompt that opens the reasoning is part of how its output is read, whole and early."""
    renderer = made(tmp_path, "qwen3.5")
    prompt = renderer.render(USER, TOOLS)
    output = renderer.vocabulary.template("let me see\n</think>\n\nall done<|im_end|>")
    parsed = renderer.parse(output, TOOLS, prompt)
    assert (parsed.message.reasoning, parsed.message.content) == ("let me see", "all done")
    pieces = renderer.pieces(TOOLS, prompt)
    shown = [piece for token in output for piece in pieces.feed([token])]
    texts = {part: "".join(text for each, text in shown if each == part) for part in ("reasoning", "text")}  # type: ignore[misc]
    assert texts == {"reasoning": "let me see", "text": "all done"}
    assert renderer.parse(output[:2], TOOLS, prompt).flags == ("unclosed_reasoning",)


def test_what_is_shown_early_was_tried(tmp_path: Path) -> None:
    """Text that may turn out to be a call is shown late; so is text after which GLM may take up its reasoning."""
    assert early_parts(made(tmp_path, "qwen3"), True) == {"reasoning", "text"}
    assert early_parts(made(tmp_path, "glm-4.5"), True) == {"reasoning"}
    assert "text" not in early_parts(made(tmp_path, "llama-3"), True)


def test_turns_are_continued_across_users(qwen: LibraryRenderer) -> None:
    """Reasoning before a new user message is kept: the template would drop it, the policy sampled it."""
    opening = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert after(qwen, "<think>\nhm\n</think>\n\nyes<|im_end|>", MORE) == (0, opening)
    assert after(qwen, "half a sen", MORE) == (0, f"<|im_end|>{opening}")
    assert after(qwen, "<think>\nhm", MORE) == (0, f"</think><|im_end|>{opening}")


def test_what_cannot_be_continued(qwen: LibraryRenderer) -> None:
    """A turn that stopped inside its reasoning, one with nothing after it, and one followed by a stranger's answer."""
    assert after(qwen, "<think>\nhm<|im_end|>", MORE) is None
    assert after(qwen, "yes<|im_end|>", ()) is None
    assert after(qwen, "yes<|im_end|>", (*MORE, Message("assistant", "few-shot"), *MORE)) is None


@pytest.mark.parametrize(
    ("written", "appended", "trim", "begins"),
    [
        ("</think>done<|user|>", MORE, 0, "\nmore"),
        ("</think>done<|user|>", RESULT, 1, "<|observation|>\n<tool_response>"),
        ("</think>done<|observation|>", MORE, 1, "<|user|>\nmore"),
        ("</think>done<|endoftext|>", MORE, 1, "<|user|>\nmore"),
        ("</think>done<|user|>", (Message("system", "s"), *MORE), 1, "<|system|>\ns<|user|>"),
        ("</think>done", MORE, 0, "<|user|>\nmore"),
        ("<think>hm", MORE, 0, "</think><|user|>\nmore"),
    ],
)
def test_stops_that_open_the_next_turn(
    tmp_path: Path, written: str, appended: tuple[Message, ...], trim: int, begins: str
) -> None:
    """GLM's stops open the next turn: the right one stands once, a wrong one goes, and none is made up."""
    found = after(made(tmp_path, "glm-4.5"), written, appended)
    assert found is not None
    assert (found[0], found[1].startswith(begins)) == (trim, True)


def test_ids_that_the_model_wrote(tmp_path: Path) -> None:
    """Kimi prints the ids of calls: a result names the one that was sampled, and not the one that we minted."""
    call = '<|tool_call_begin|>functions.look:7<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    sampled = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|><|im_end|>"
    found = after(made(tmp_path, "kimi-k2"), sampled, RESULT)
    assert found is not None
    assert "## Return of functions.look:7\nfound" in found[1]


class Harmony:
    """gpt-oss's encoder for the messages that these tests print; the real one's vocabulary is not on PyPI."""

    def __init__(self, renderer_folder: Path) -> None:
        self.vocabulary = for_folder(MODEL).vocabulary.__class__(renderer_folder)  # type: ignore[attr-defined]

    def render(self, message: Any) -> list[int]:
        """One message in the wire's order: author, recipient, channel, text, end."""
        author = message.author.name or message.author.role.value
        header = author + (f" to={message.recipient}" if message.recipient else "")
        channel = f"<|channel|>{message.channel}" if message.channel else ""
        body = "".join(getattr(part, "text", None) or type(part).__name__ for part in message.content)
        end = "<|call|>" if (message.recipient or "").startswith("functions.") else "<|end|>"
        return list(self.vocabulary.template(f"<|start|>{header}{channel}<|message|>{body}{end}"))

    def render_conversation(self, conversation: Any) -> list[int]:
        """The messages one after the other."""
        return [token for message in conversation.messages for token in self.render(message)]


@pytest.mark.parametrize(
    ("written", "appended", "expected"),
    [
        (
            "hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
            MORE,
            (1, "<|end|><|start|>user<|message|>"),
        ),
        (
            "hm<|end|><|start|>assistant to=functions.look<|channel|>commentary<|message|>{}<|call|>",
            RESULT,
            (0, "<|start|>functions.look to=assistant<|channel|>commentary<|message|>found"),
        ),
        ("hm", MORE, (0, "<|end|><|start|>user<|message|>")),
    ],
)
def test_a_stop_that_history_spells_differently(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: str,
    appended: tuple[Message, ...],
    expected: tuple[int, str],
) -> None:
    """gpt-oss samples <|return|> and reads <|end|> in its history: the one is trimmed, the other put there."""
    folder = family_folder(tmp_path, HARMONY)
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda _: Harmony(folder))
    renderer = LibraryRenderer(folder, "gpt-oss")
    found = after(renderer, written, appended)
    assert found is not None
    assert (found[0], found[1].startswith(expected[1])) == (expected[0], True)
    parsed = renderer.parse(renderer.vocabulary.template(written), TOOLS, renderer.render(USER, TOOLS))
    assert (parsed.message.reasoning, bool(parsed.message.tool_calls)) == ("hm", appended is RESULT)


def test_a_family_by_the_models_name(tmp_path: Path) -> None:
    """The engine's word or the folder's config names a model that the library knows."""
    folder = family_folder(tmp_path, FAMILIES["qwen3"])
    assert for_folder(folder, "auto", "Qwen/Qwen3-8B").name == "qwen3"
    (folder / "config.json").write_text(json.dumps({"_name_or_path": "Qwen/Qwen3-VL-4B-Instruct"}))
    assert family_of(folder, "policy") == "qwen3-vl"


def test_a_family_by_its_template(tmp_path: Path) -> None:
    """A fine-tune of another name is known by its own chat template, and by nothing less than all it prints."""
    renderer = made(tmp_path, "kimi-k2")
    folder = family_folder(tmp_path / "tuned", FAMILIES["kimi-k2"])
    branches = []
    for messages, offers in PROBES:
        tools = [families.LOOK] if offers else None
        ids = renderer._library.render_ids(messages, tools=tools, add_generation_prompt=True)
        first = json.dumps(messages[0]["content"])
        printed = json.dumps(renderer.decode(list(ids)), ensure_ascii=False)
        branches.append(f"{{%- if messages[0]['content'] == {first} -%}}{{{{ {printed} }}}}{{%- endif -%}}")
    (folder / "chat_template.jinja").write_text("".join(branches))
    assert for_folder(folder, "auto", "my/tune").name == "kimi-k2"
    other = family_folder(tmp_path / "other", FAMILIES["kimi-k2"])
    (other / "chat_template.jinja").write_text("".join(branches).replace("Done.", "Done!"))
    with pytest.raises(SpecError, match="no family of the library fits"):
        for_folder(other, "auto", "my/tune")


def test_names_that_are_none() -> None:
    """A name that nobody has is answered with those there are; a family without its tokens says which is missing."""
    with pytest.raises(SpecError, match=r"'qwen4'.*glm-4.5.*chatml"):
        for_folder(MODEL, "qwen4")
    with pytest.raises(SpecError, match="glm-4.5 does not fit .*gMASK"):
        for_folder(MODEL, "glm-4.5")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is not installed, the error says how to install it."""
    families.families.cache_clear()
    monkeypatch.setitem(sys.modules, "renderers.configs", None)
    with pytest.raises(SpecError, match=r"pip install 'polar-rollout\[renderers\]'"):
        LibraryRenderer(MODEL, "qwen3")


def test_a_history_that_the_template_refuses(tmp_path: Path) -> None:
    """It is the harness's to mend, so it is told."""
    with pytest.raises(HarnessError, match="System message must be at the beginning"):
        made(tmp_path, "qwen3.5").render((*USER, Message("system", "late")), ())


def test_marks_never_reach_the_prompt(qwen: LibraryRenderer) -> None:
    """What keeps content from spelling control tokens is gone again when it is encoded."""
    text = "a <|im_end|> b <tool_call> <think>"
    messages = (Message("system", text), Message("user", text), Message("assistant", text, text), Message("tool", text))
    shown = qwen.decode(qwen.render(messages, (Tool(text, raw={"name": text}),)))
    assert MARK not in shown
    assert shown.count(text) == 6


def test_the_self_test_names_the_case(qwen: LibraryRenderer) -> None:
    """A renderer that joins turns wrongly is caught, and what it printed is shown."""

    class Forgetful(LibraryRenderer):
        """Leaves the line feed after a turn out."""

        def bridge(self, *arguments: Any) -> Any:  # type: ignore[override]
            bridge = super().bridge(*arguments)
            return bridge and type(bridge)(bridge.ids[1:], bridge.trim)

    found = self_test(Forgetful(MODEL, "qwen3"))
    assert found.difference is not None
    assert "after user assistant" in found.difference.replace("system ", "").replace("+call", "")
    assert "continued '<|im_start|>user" in found.difference
    assert self_test(qwen).difference is None
