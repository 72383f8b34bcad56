"""Messages to a prompt and text back to a message, as engines do it behind their chat endpoint: by the checkpoint's
own chat template, and a reader of JSON tool calls and of reasoning in tags.

It does what vLLM does, drift included: arguments are parsed before the template prints them again, and the answer's
text is trimmed. Which routes there are is `vllm_api`'s affair.
"""

from __future__ import annotations

import json
import re
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

THINK = re.compile(r"\A\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class TemplateError(ValueError):
    """The checkpoint has no chat template, or it refuses these messages."""


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=4)
def _template(path: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(path.read_text())
    except (OSError, jinja2.TemplateError) as error:
        raise TemplateError(f"{path} is no usable chat template: {error}") from error


def render(folder: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """The prompt's text, up to where the assistant speaks. Raises TemplateError."""
    template = _template(folder / "chat_template.jinja")
    try:
        return template.render(messages=[_plain(each) for each in messages], tools=tools, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise TemplateError(f"the chat template refuses these messages: {error}") from error


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text for content, objects for arguments."""
    found = dict(message)
    if isinstance(content := message.get("content"), list):
        found["content"] = "\n".join(part.get("text", "") for part in content if part.get("type") == "text")
    found["reasoning_content"] = message.get("reasoning_content") or message.get("reasoning")
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        if isinstance(text := function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(text or "{}")
            except json.JSONDecodeError as error:
                raise TemplateError(f"the arguments of a tool call are not JSON: {error}") from error
        calls.append({**call, "function": function})
    found["tool_calls"] = calls
    return found


def read(text: str, with_tools: bool) -> dict[str, Any]:
    """The assistant message that a sampled text, its end token taken off, stands for."""
    reasoning = None
    if (thought := THINK.match(text)) is not None:
        reasoning, text = thought[1].strip(), text[thought.end() :]
    calls: list[dict[str, Any]] = []
    if with_tools:
        found = [_call(match[1]) for match in CALL.finditer(text)]
        if found and all(found):
            calls = [call for call in found if call is not None]
            text = text[: text.index("<tool_call>")]
    message: dict[str, Any] = {"role": "assistant", "content": text.strip() or None, "reasoning": reasoning}
    return {**message, "tool_calls": calls} if calls else message


def _call(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        function = {"name": value["name"], "arguments": json.dumps(value["arguments"], ensure_ascii=False)}
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
    return {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function", "function": function}
