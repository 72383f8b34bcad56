"""Anthropic's tools as functions that any model can call.

Three kinds come: tools with a schema of their own; tools that Anthropic defines by a dated type and the client
executes, whose schema is written here from their public contract; and tools that Anthropic's servers execute,
which nobody here can, so they are left out and the completion says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from polar.dialects.reading import mapping, required, string, wrong
from polar.dialects.tools import function
from polar.messages import Tool

DATED = re.compile(r"(bash|text_editor|computer|memory)_(\d{8})")
SEARCH = "tool_search_tool_"
UNAVAILABLE = "tool_unavailable:"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TEXT = {"type": "string"}
WHOLE = {"type": "integer"}
POINT = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
FIRST_MOUSE = ("mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click")
FIRST_ACTIONS = ("key", "type", *FIRST_MOUSE, "screenshot", "cursor_position")
LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")


@dataclass(slots=True)
class Toolbox:
    """The tools of a request."""

    offered: list[Tool] = field(default_factory=list)
    deferred: dict[str, Tool] = field(default_factory=dict)
    """Those that the model is told of only where a block in the conversation brings them, by their names."""

    def named(self, name: str) -> Tool | None:
        """The tool of this name, offered or not yet."""
        return next((tool for tool in self.offered if tool.name == name), self.deferred.get(name))


def toolbox(entries: list[Any], marks: list[str]) -> Toolbox:
    """The tools that a client executes; the others become marks. Raises BadRequest."""
    box = Toolbox()
    found = [mapping(entry, f"tools[{i}]") for i, entry in enumerate(entries)]
    # Held back until a search finds them, so that the head of the conversation stays as it was; but where the search
    # would be Anthropic's servers', nobody here could ever find them.
    defers = not any(str(entry.get("type")).startswith(SEARCH) for entry in found)
    for index, entry in enumerate(found):
        tool = read_tool(entry, f"tools[{index}]", marks)
        if tool is None:
            continue
        if defers and entry.get("defer_loading") is True:
            box.deferred[tool.name] = tool
        else:
            box.offered.append(tool)
    return box


def tool_choice(value: Any, box: Toolbox, marks: list[str]) -> str:
    """auto, none, required, or a tool's name. Raises BadRequest for a tool that is not offered."""
    if value is None:
        return "auto"
    choice = mapping(value, "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        marks.append("disable_parallel_tool_use")
    kind = choice.get("type")
    if kind in ("any", "tool"):
        marks.append("tool_choice")
    there = ", ".join([*(tool.name for tool in box.offered), *box.deferred]) or "none"
    if kind == "tool":
        name = required(choice, "name", "tool_choice.")
        if box.named(name) is None:
            gone = "is executed by Anthropic's servers" if UNAVAILABLE + name in marks else "is not among the tools"
            raise wrong("tool_choice.name", f"{name} {gone}; of tools there are here: {there}")
        return name
    if kind == "any" and not box.offered:
        left_out = ", ".join(mark.removeprefix(UNAVAILABLE) for mark in marks if mark.startswith(UNAVAILABLE))
        raise wrong("tool_choice.type", f"any needs tools that the client executes; given: {left_out or 'none'}")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise wrong("tool_choice.type", f"must be auto, any, tool or none, not {kind!r}")
    return CHOICES[kind]


def read_tool(entry: dict[str, Any], where: str, marks: list[str]) -> Tool | None:
    """One tool; None, and a mark, for one that the client does not execute. Raises BadRequest."""
    kind = string(entry.get("type"), f"{where}.type") or "custom"
    if kind == "custom" or entry.get("input_schema") is not None:
        name = required(entry, "name", f"{where}.")
        schema = entry.get("input_schema")
        if schema is None:
            raise wrong(f"{where}.input_schema", "Field required")
        said = string(entry.get("description"), f"{where}.description")
        return function(name, said, mapping(schema, f"{where}.input_schema"))
    if dated := DATED.fullmatch(kind):
        described, parameters = _contract(dated[1], int(dated[2]), entry, where)
        return function(string(entry.get("name"), f"{where}.name") or dated[1], described, parameters)
    called = entry.get("name") or entry.get("mcp_server_name")
    marks.append(f"{UNAVAILABLE}{called if isinstance(called, str) else kind}")
    return None


def _contract(family: str, version: int, entry: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Description and schema of a tool that its type alone defines."""
    if family == "bash":
        said = "Run a command in a bash session that lasts between calls. Give restart alone to begin a new session."
        return said, _object({"command": TEXT, "restart": {"type": "boolean"}})
    if family == "text_editor":
        return _editor(version)
    if family == "computer":
        return _computer(version, entry, where)
    said = (
        "Keep notes in files below /memories, which last between conversations: view a file or folder, create a file, "
        "replace or insert text, delete or rename."
    )
    fields = {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
        **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text", "old_path", "new_path"), TEXT),
        "insert_line": WHOLE,
        "view_range": {**POINT, "description": "First and last line to view."},
    }
    return said, _object(fields, "command")


def _editor(version: int) -> tuple[str, dict[str, Any]]:
    commands = ["view", "create", "str_replace", "insert"]
    if version < 20250429:
        commands.append("undo_edit")
    # Until then what insert puts in was the same parameter as what str_replace puts in.
    inserted = "insert_text" if version >= 20250728 else "new_str"
    said = (
        "View, create and edit files. str_replace replaces old_str, which must occur exactly once, by new_str; "
        f"insert puts {inserted} after the line insert_line."
    )
    fields = {
        "command": {"type": "string", "enum": commands},
        **dict.fromkeys(("path", "file_text", "old_str", "new_str", inserted), TEXT),
        "insert_line": WHOLE,
        "view_range": {**POINT, "description": "First and last line to view; -1 is the end of the file."},
    }
    return said, _object(fields, "command", "path")


def _computer(version: int, entry: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    actions = [*FIRST_ACTIONS, *(LATER_ACTIONS if version >= 20250124 else ())]
    fields: dict[str, Any] = {"coordinate": POINT, "text": {**TEXT, "description": "What to type, or keys to press."}}
    if version >= 20250124:
        fields |= {
            "start_coordinate": POINT,
            "duration": {"type": "number", "description": "Seconds to wait or to hold keys."},
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": WHOLE,
        }
    if entry.get("enable_zoom") is True:
        actions.append("zoom")
        fields["region"] = {**POINT, "minItems": 4, "maxItems": 4}
    width, height = (entry.get(f"display_{side}_px") for side in ("width", "height"))
    for side, size in (("width", width), ("height", height)):
        if size is not None and not isinstance(size, int):
            raise wrong(f"{where}.display_{side}_px", "must be a whole number")
    said = f"Use a computer by mouse, keyboard and screenshots; its screen has {width} x {height} pixels."
    return said, _object({"action": {"type": "string", "enum": actions}, **fields}, "action")


def _object(properties: dict[str, Any], *needed: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(needed)}
