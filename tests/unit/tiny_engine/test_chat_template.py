"""The packaged chat template prints the layout that the model was trained on."""

from __future__ import annotations

import json

import jinja2
import pytest

from polar.tiny_engine import MODEL_DIR
from polar.tiny_engine.lookup import SYSTEMS, TOOL, Episode


def render(messages: list[dict], tools: list[dict] | None = None, generate: bool = True) -> str:
    """A conversation as the template prints it, under the environment that transformers sets up."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    template = environment.from_string((MODEL_DIR / "chat_template.jinja").read_text())
    return template.render(messages=messages, tools=tools, add_generation_prompt=generate)


@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_prints_the_trained_prompt(system: str) -> None:
    """The task's conversation renders to exactly the text of the training set."""
    episode = Episode("b", "47", system)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "find b"})
    tools = [{"type": "function", "function": TOOL}]
    assert render(messages, tools) == episode.first_prompt()
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "b"}}}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "47"}]
    assert render(messages, tools) == episode.first_prompt() + episode.call() + episode.bridge()


def test_prints_reasoning_several_calls_and_several_results() -> None:
    """Calls are set apart by newlines, results share one user turn, and no system turn is invented."""
    calls = [{"function": {"name": name, "arguments": {"x": "é"}}} for name in ("f", "g")]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]
    assert render(messages, generate=False) == (
        "<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nok"
        '\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": {"x": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>\n"
    )


def test_prints_a_system_message_without_tools() -> None:
    """Without tools the system turn holds the message alone."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert render(messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
