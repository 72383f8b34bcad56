"""Tools of the Responses API: which of them the model is offered, and what their calls are on the wire.

Whatever the client runs itself is offered as a function, built-in kinds by a schema of their public fields. What
only the provider could run is not offered, and marked. Both directions of a call are here, side by side; where the
calls stand in a conversation is `responses_input`'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from polar.dialects import seals, tools
from polar.dialects.reading import listed, mapping, required, string, wrong
from polar.messages import ModelRequest, Tool, ToolCall

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "integer"}
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}
PATCH_KINDS = ("create_file", "update_file", "delete_file")
LOCAL_SHELL = {
    "type": "object",
    "properties": {
        "command": {**TEXTS, "description": "The program and its arguments, one string each."},
        "working_directory": TEXT,
        "timeout_ms": NUMBER,
        "env": {"type": "object", "additionalProperties": TEXT},
    },
    "required": ["command"],
}
SHELL = {
    "type": "object",
    "properties": {
        "commands": {**TEXTS, "description": "Shell commands, each run on its own."},
        "timeout_ms": NUMBER,
        "max_output_length": {**NUMBER, "description": "Characters of output to keep."},
    },
    "required": ["commands"],
}
APPLY_PATCH = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": list(PATCH_KINDS)},
        "path": TEXT,
        "diff": {"type": "string", "description": "The change as a V4A diff; not for delete_file."},
    },
    "required": ["type", "path"],
}
BUILT_IN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "local_shell": ("Run a program on the local machine.", LOCAL_SHELL),
    "shell": ("Run shell commands on the local machine.", SHELL),
    "apply_patch": ("Create, update or delete one file.", APPLY_PATCH),
}
"""Tools that the client runs and that have no schema on the wire: what they are for, and their parameters."""
CALLS: Mapping[str, str] = {
    "function_call": "function",
    "custom_tool_call": "custom",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
    "tool_search_call": "tool_search",
    "computer_call": "computer",
}
"""Types of items that are calls, with the kind of tool they call."""
PREFIXES: Mapping[str, str] = {
    "custom": "ctc",
    "local_shell": "lsh",
    "shell": "sh",
    "apply_patch": "apc",
    "tool_search": "tsc",
}


def offered(entries: list[Any], field: str, marks: list[str]) -> list[Tool]:
    """The tools that the model is offered; the first of those that have one name."""
    found: dict[str, Tool] = {}
    for index, value in enumerate(entries):
        where = f"{field}[{index}]"
        for tool in _offered(mapping(value, where), where, marks):
            found.setdefault(tool.name, tool)
    return list(found.values())


def _offered(entry: dict[str, Any], field: str, marks: list[str]) -> list[Tool]:
    kind = required(entry, "type", f"{field}.")
    if kind in ("function", "custom"):
        return [_named(entry, field, None)]
    if kind == "namespace":
        group = required(entry, "name", f"{field}.")
        found = []
        for index, member in enumerate(listed(entry.get("tools"), f"{field}.tools")):
            where = f"{field}.tools[{index}]"
            found.append(_named(mapping(member, where), where, group))
        return found
    if kind in BUILT_IN and not _hosted(entry):
        description, parameters = BUILT_IN[kind]
        return [tools.function(kind, description, dict(parameters), kind=kind)]
    if kind == "tool_search" and entry.get("execution") == "client":
        description = string(entry.get("description"), f"{field}.description") or "Find more tools."
        return [tools.function(kind, description, _parameters(entry, field), kind=kind)]
    marks.append(f"tool_unavailable:{kind}")
    return []


def _hosted(entry: dict[str, Any]) -> bool:
    """A shell in a container of the provider's."""
    environment = entry.get("environment")
    return isinstance(environment, dict) and environment.get("type") not in (None, "local")


def _named(entry: dict[str, Any], field: str, group: str | None) -> Tool:
    name = required(entry, "name", f"{field}.")
    description = string(entry.get("description"), f"{field}.description")
    more = {} if group is None else {"namespace": group, "wire_name": name}
    called = name if group is None else tools.grouped(group, name)
    if entry.get("type") == "custom":
        form = entry.get("format")
        form = mapping(form, f"{field}.format") if form is not None else {}
        return tools.freeform(called, description, form if form.get("type") == "grammar" else None, **more)
    return tools.function(called, description, _parameters(entry, field), **more)


def _parameters(entry: dict[str, Any], field: str) -> dict[str, Any]:
    parameters = entry.get("parameters")
    return dict(NOTHING) if parameters is None else mapping(parameters, f"{field}.parameters")


def choice(value: Any, known: list[Tool]) -> str:
    """`auto`, `none`, `required`, or the name of the one tool that must be called."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise wrong("tool_choice", f"must be auto, none, required or an object, not {value!r}")
        return value
    asked = mapping(value, "tool_choice")
    kind = required(asked, "type", "tool_choice.")
    if kind == "allowed_tools":
        return choice(asked.get("mode") or "auto", known)
    name = required(asked, "name", "tool_choice.") if kind in ("function", "custom") else kind
    for tool in known:
        named = (tool.wire_name or tool.name) == name and asked.get("namespace") in (None, tool.namespace)
        if tool.kind == kind and named:
            return tool.name
    if kind in ("function", "custom") or kind in BUILT_IN:
        raise wrong("tool_choice", f"{name!r} is not among tools")
    raise wrong("tool_choice", f"{kind!r} is run by its provider, and cannot be run here")


def item(request: ModelRequest, call: ToolCall, completion_id: str, index: int) -> dict[str, Any]:
    """A call as the kind of tool that was offered; as a function call where its arguments do not fit that kind."""
    kind, name, group = tools.offered_kind(request, call)
    known = {"call_id": call.id, "status": "completed"}
    ours = _fitting(kind, call)
    if ours is None:
        head = {"type": "function_call", "id": _id("fc", completion_id, index), **known}
        return {**head, "name": name, "arguments": call.arguments, **_of(group)}
    head = {"type": f"{kind}_call", "id": _id(PREFIXES[kind], completion_id, index), **known}
    if kind == "custom":
        return {**head, "type": "custom_tool_call", "name": name, **ours, **_of(group)}
    return {**head, **ours}


def _of(group: str | None) -> dict[str, Any]:
    return {} if group is None else {"namespace": group}


def _id(prefix: str, completion_id: str, index: int) -> str:
    return f"{seals.item_id(prefix, completion_id)}_{index}"


def _fitting(kind: str, call: ToolCall) -> dict[str, Any] | None:
    """The fields of a call that is not a function's; None if it can only be one."""
    if kind == "custom":
        return {"input": tools.freeform_input(call)}
    value = _object(call.arguments)
    if kind == "function" or value is None:
        return None
    if kind == "tool_search":
        return {"arguments": value, "execution": "client"}
    if kind == "local_shell" and _texts(value.get("command")):
        env = value.get("env") if _is_env(value.get("env")) else {}
        action = {"type": "exec", "command": value["command"], "env": env, **_numbers(value, "timeout_ms")}
        folder = value.get("working_directory")
        return {"action": {**action, **({"working_directory": folder} if isinstance(folder, str) else {})}}
    if kind == "shell" and _texts(value.get("commands")):
        action = {"timeout_ms": None, "max_output_length": None}
        action |= {"commands": value["commands"], **_numbers(value, "timeout_ms", "max_output_length")}
        return {"action": action, "environment": {"type": "local"}}
    if kind == "apply_patch" and value.get("type") in PATCH_KINDS and isinstance(value.get("path"), str):
        fields = ("type", "path") if value["type"] == "delete_file" else ("type", "path", "diff")
        operation = {name: value.get(name) for name in fields}
        return {"operation": operation} if all(isinstance(text, str) for text in operation.values()) else None
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _is_env(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _numbers(value: dict[str, Any], *names: str) -> dict[str, int]:
    return {name: value[name] for name in names if isinstance(value.get(name), int)}


def called(entry: dict[str, Any], field: str) -> ToolCall:
    """A call that a harness sends back."""
    kind = CALLS[entry["type"]]
    id_ = string(entry.get("call_id"), f"{field}.call_id") or string(entry.get("id"), f"{field}.id")
    if kind in ("function", "custom"):
        name = required(entry, "name", f"{field}.")
        group = string(entry.get("namespace"), f"{field}.namespace")
        name = tools.grouped(group, name) if group else name
        if kind == "custom":
            return ToolCall(id_, name, tools.freeform_arguments(string(entry.get("input"), f"{field}.input")))
        return ToolCall(id_, name, _written(entry.get("arguments"), f"{field}.arguments"))
    if kind == "tool_search":
        return ToolCall(id_, kind, _written(entry.get("arguments"), f"{field}.arguments"))
    part = "operation" if kind == "apply_patch" else "actions" if "actions" in entry else "action"
    asked = entry.get(part)
    if isinstance(asked, dict):
        # What the wire adds to the model's own words is taken off again.
        added = ("type",) if kind == "local_shell" else ()
        asked = {name: value for name, value in asked.items() if value not in (None, {}) and name not in added}
    return ToolCall(id_, kind, orjson.dumps(asked if isinstance(asked, dict) else {part: asked}).decode())


def _written(value: Any, field: str) -> str:
    return orjson.dumps(value).decode() if isinstance(value, dict) else string(value, field)
