"""Tools that are not plain functions, offered to the model as functions: the model knows no other kind.

A freeform tool takes one text, so it becomes a function with one parameter; a tool in a group gets the group's
name before its own. The dialect that offered a tool asks here what a call of it says in the tool's own terms.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from polar.messages import ModelRequest, Tool, ToolCall

INPUT = "input"
"""The one parameter of a freeform tool."""
JOINT = "__"
NAMES = re.compile(r"[^A-Za-z0-9_.-]")


def function(name: str, description: str, parameters: dict[str, Any], **more: Any) -> Tool:
    """A tool whose printed form is made here, for those that the wire does not send as a function."""
    raw = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, description, parameters, raw, **more)


def freeform(name: str, description: str, grammar: dict[str, Any] | None, **more: Any) -> Tool:
    """A tool that takes one text, perhaps of a grammar."""
    said = "The whole input, as plain text."
    if grammar:
        said = f"The whole input, as plain text of this {grammar.get('syntax') or 'formal'} grammar:\n"
        said += str(grammar.get("definition") or "")
    parameters = {"type": "object", "properties": {INPUT: {"type": "string", "description": said}}, "required": [INPUT]}
    return function(name, description, parameters, kind="custom", **more)


def grouped(group: str, name: str) -> str:
    """The name by which the model calls a tool of a group."""
    return NAMES.sub("_", f"{group}{JOINT}{name}")


def freeform_input(call: ToolCall) -> str:
    """The text that a call gives to a freeform tool; what cannot be read as one is passed on as it is."""
    try:
        value = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return call.arguments
    if isinstance(value, dict) and isinstance(value.get(INPUT), str):
        return str(value[INPUT])
    return call.arguments


def freeform_arguments(text: str) -> str:
    """The inverse of `freeform_input`, for calls that a harness sends back."""
    return orjson.dumps({INPUT: text}).decode()


def offered_kind(request: ModelRequest, call: ToolCall) -> tuple[str, str, str | None]:
    """Kind, wire name and group of the tool that is called; what was not offered is taken for a function."""
    tool = request.tool(call.name)
    if tool is None:
        return "function", call.name, None
    return tool.kind, tool.wire_name or tool.name, tool.namespace
