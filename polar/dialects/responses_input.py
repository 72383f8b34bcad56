"""Input items of the Responses API, read into messages.

The wire has one list of small items where the inside language has whole messages: reasoning, text and calls of one
completion become one assistant message, wherever their items stand. What is only of use to the provider that made it
is shown to the model in words and marked; what nobody knows is marked. What tools and calls are is
`responses_tools`' affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.dialects import responses_tools, seals
from polar.dialects.base import BadRequest
from polar.dialects.content import Content, split_data_url
from polar.dialects.reading import listed, mapping, string, wrong
from polar.messages import Message, Role, Tool, ToolCall, plain_message

ROLES: Mapping[str, Role] = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
OUTPUTS = frozenset(
    {
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
        "computer_call_output",
        "tool_search_output",
    }
)
FOREIGN = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "program",
        "program_output",
    }
)
"""What a provider's own tools did: items that can only come from a conversation that was begun elsewhere."""
COMPACTIONS = frozenset({"compaction", "compaction_summary", "context_compaction"})
TRIGGER = "compaction_trigger"
SILENT = frozenset({TRIGGER, "configuration_update"})
SUMMARY = "This conversation was longer. A summary of what came before:\n\n"
LOST_SUMMARY = "[an earlier part of this conversation was summarised elsewhere; the summary cannot be read here]"
LONGEST_WORDS = 2000


@dataclass(slots=True, eq=False)
class Turn:
    """An assistant message as it grows."""

    completion: str | None = None
    """The completion that its items name."""
    anchor: str | None = None
    content: Content = field(default_factory=Content)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        """The whole of it."""
        if not (self.reasoning or self.calls or self.content.images or self.anchor):
            return plain_message("assistant", self.content.text)
        return Message(
            "assistant",
            self.content.text,
            "\n".join(self.reasoning) or None,
            tuple(self.calls),
            images=tuple(self.content.images),
            anchor=self.anchor,
        )


class Conversation:
    """All messages of one request, in order."""

    def __init__(self) -> None:
        self.marks: list[str] = []
        self.tools: list[Tool] = []
        """Tools that items of the input bring along."""
        self._entries: list[Message | Turn] = []
        self._turns: dict[str, Turn] = {}

    def messages(self) -> tuple[Message, ...]:
        """What has been read."""
        return tuple(entry.message() if isinstance(entry, Turn) else entry for entry in self._entries)

    def say(self, role: Role, text: str) -> None:
        """A message of plain text."""
        self._entries.append(Message(role, text))

    def read(self, value: Any, where: str) -> None:
        """One item of the input."""
        item = mapping(value, where)
        kind = item.get("type")
        if kind is None and "role" not in item and "id" in item:
            kind = "item_reference"
        if kind in (None, "message"):
            self._message(item, where)
        elif not isinstance(kind, str):
            raise wrong(f"{where}.type", "must be a string")
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in responses_tools.CALLS:
            call = responses_tools.called(item, where)
            self._turn(item, call.id).calls.append(call)
        elif kind in OUTPUTS:
            self._output(item, kind, where)
        elif kind in COMPACTIONS:
            self._compaction(item, where)
        elif kind == "item_reference":
            raise not_stored(f"{where}.id", string(item.get("id"), f"{where}.id"))
        elif kind == "additional_tools":
            self._bring(item, where)
        elif kind in FOREIGN:
            self._turn(item).content.add(_words(kind, item))
            self.marks.append(f"foreign_item:{kind}")
        elif kind not in SILENT:
            # Kept in the recorded body; a harness that is newer than this file must not end for it.
            self.marks.append(f"unknown_item:{kind}")

    def _turn(self, item: Mapping[str, Any], call_id: str = "", anchor: str | None = None) -> Turn:
        """The assistant message that an item belongs to."""
        own = item.get("id")
        anchor = anchor or (seals.item_anchor(own) if isinstance(own, str) else None)
        completion = anchor or seals.item_anchor(call_id)
        last = self._entries[-1] if self._entries else None
        if completion is not None and completion in self._turns:
            turn = self._turns[completion]
        elif isinstance(last, Turn) and (completion is None or last.completion is None):
            turn = last
        else:
            turn = Turn()
            self._entries.append(turn)
        if completion is not None:
            turn.completion = completion
            self._turns[completion] = turn
        turn.anchor = turn.anchor or anchor
        return turn

    def _message(self, item: dict[str, Any], where: str) -> None:
        named = item.get("role")
        role = ROLES.get(named) if isinstance(named, str) else None
        if role is None:
            raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {named!r}")
        content = read_content(item.get("content"), f"{where}.content")
        self.marks += content.marks
        if role != "assistant":
            images = tuple(content.images)
            self._entries.append(
                Message(role, content.text, images=images) if images else plain_message(role, content.text)
            )
            return
        turn = self._turn(item)
        turn.content.add(content.text)

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        sealed = item.get("encrypted_content")
        seal = seals.unseal(sealed) if isinstance(sealed, str) else None
        shown = [
            read_content(listed(item.get(name), f"{where}.{name}"), f"{where}.{name}").text
            for name in ("content", "summary")
        ]
        text = (seal.reasoning if seal else "") or shown[0] or shown[1]
        turn = self._turn(item, anchor=seal.anchor if seal else None)
        if text:
            turn.reasoning.append(text)

    def _output(self, item: dict[str, Any], kind: str, where: str) -> None:
        read = READERS.get(kind, _plain_output)
        content = read(item, where)
        self.marks += content.marks
        if kind == "tool_search_output":
            self._bring(item, where)
        id_ = string(item.get("call_id"), f"{where}.call_id") or string(item.get("id"), f"{where}.id")
        self._entries.append(
            Message(
                "tool",
                content.text,
                tool_call_id=id_ or None,
                images=tuple(content.images),
                is_error=item.get("status") == "failed" or item.get("success") is False,
            )
        )

    def _compaction(self, item: dict[str, Any], where: str) -> None:
        sealed = string(item.get("encrypted_content"), f"{where}.encrypted_content")
        seal = seals.unseal(sealed)
        if seal is None:
            self.say("user", LOST_SUMMARY)
            self.marks.append("summary_unread")
        else:
            self.say("user", SUMMARY + seal.reasoning)

    def _bring(self, item: dict[str, Any], where: str) -> None:
        entries = listed(item.get("tools"), f"{where}.tools")
        self.tools += responses_tools.offered(entries, f"{where}.tools", self.marks)


def not_stored(name: str, id_: str) -> BadRequest:
    """The refusal of an item that is named and not sent."""
    said = f"{name}: there is no stored item {id_!r} here; send the item itself, or keep its response with store: true"
    return BadRequest(said, field=name, code="item_not_found")


def read_content(value: Any, where: str) -> Content:
    """What is a string, a list of parts, or nothing."""
    content = Content()
    if value is None or isinstance(value, str):
        content.add(value or "")
        return content
    for index, part in enumerate(listed(value, where)):
        if isinstance(part, str):
            content.add(part)
        else:
            _part(content, mapping(part, f"{where}[{index}]"), f"{where}[{index}]")
    return content


def _part(content: Content, part: dict[str, Any], where: str) -> None:
    kind = string(part.get("type"), f"{where}.type")
    if kind in TEXT_PARTS:
        content.add(string(part.get("text"), f"{where}.text"))
    elif kind == "refusal":
        content.add(string(part.get("refusal"), f"{where}.refusal"))
    elif kind in ("input_image", "computer_screenshot", "image_url"):
        _picture(content, part, where)
    elif kind == "input_file":
        _file(content, part, where)
    elif kind == "input_audio":
        content.unread("audio")
    elif isinstance(kind, str) and kind:
        content.unread(kind.removeprefix("input_"))
        content.marks.append(f"unknown_part:{kind}")
    else:
        raise wrong(f"{where}.type", "is missing")


def _picture(content: Content, part: dict[str, Any], where: str) -> None:
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    source = string(url, f"{where}.image_url")
    if source:
        content.picture(source)
    elif file := string(part.get("file_id"), f"{where}.file_id"):
        content.unread(f"image: {file}")
    else:
        raise wrong(f"{where}.image_url", "is missing")


def _file(content: Content, part: dict[str, Any], where: str) -> None:
    name = string(part.get("filename"), f"{where}.filename")
    data = string(part.get("file_data"), f"{where}.file_data")
    source = string(part.get("file_url"), f"{where}.file_url") or string(part.get("file_id"), f"{where}.file_id")
    if not data:
        content.unread(f"document: {name or source or 'file'}")
        return
    media_type, data = split_data_url(data) or ("", data)
    content.document(name or "file", media_type, data)


def _plain_output(item: dict[str, Any], where: str) -> Content:
    output = item.get("output")
    if isinstance(output, dict):
        # Some clients wrap it once more.
        output = output.get("content") or orjson.dumps(output).decode()
    return read_content(output, f"{where}.output")


def _shell_output(item: dict[str, Any], where: str) -> Content:
    """Each command's streams and how it ended."""
    output = item.get("output")
    if not isinstance(output, list):
        return _plain_output(item, where)
    content = Content()
    for index, value in enumerate(output):
        chunk = mapping(value, f"{where}.output[{index}]")
        for name in ("stdout", "stderr"):
            content.add(string(chunk.get(name), f"{where}.output[{index}].{name}"))
        outcome = chunk.get("outcome")
        if isinstance(outcome, dict) and outcome.get("type") == "timeout":
            content.add("[timed out]")
        elif isinstance(outcome, dict) and outcome.get("exit_code"):
            content.add(f"[exit code {outcome['exit_code']}]")
    return content


def _screenshot(item: dict[str, Any], where: str) -> Content:
    content = Content()
    _picture(content, mapping(item.get("output"), f"{where}.output"), f"{where}.output")
    return content


def _found_tools(item: dict[str, Any], where: str) -> Content:
    content = Content()
    names = []
    for index, entry in enumerate(listed(item.get("tools"), f"{where}.tools")):
        found = mapping(entry, f"{where}.tools[{index}]")
        names.append(str(found.get("name") or found.get("type")))
    content.add(f"Tools found: {', '.join(names) or 'none'}")
    return content


READERS: Mapping[str, Callable[[dict[str, Any], str], Content]] = {
    "shell_call_output": _shell_output,
    "computer_call_output": _screenshot,
    "tool_search_output": _found_tools,
}


def _words(kind: str, item: dict[str, Any]) -> str:
    told = {name: value for name, value in item.items() if name not in ("id", "type", "status", "result") and value}
    return f"[{kind}: {orjson.dumps(told).decode()[:LONGEST_WORDS]}]"


def items_of(value: Any, where: str = "input") -> list[Any]:
    """Input as a list of items: a text alone is a message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    return listed(value, where)


def summarises(items: Any) -> bool:
    """Whether a summary is asked for instead of an answer. A trigger that is not the last item is past."""
    return isinstance(items, list) and bool(items) and isinstance(items[-1], dict) and items[-1].get("type") == TRIGGER


def kept(items: list[Any]) -> list[dict[str, Any]]:
    """What stays of a conversation that is summarised: the user's own messages."""
    found: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, dict) and item.get("type") in (None, "message") and item.get("role") == "user":
            content = item.get("content")
            parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            id_ = item.get("id") or f"msg_kept_{len(found)}"
            found.append({"id": id_, "type": "message", "status": "completed", "role": "user", "content": parts})
    return found


def reference(item: Any) -> str | None:
    """The id by which an item stands for another one; None for an item that is itself there."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return None
    kind = item.get("type")
    named = kind == "item_reference" or (kind is None and "role" not in item)
    return str(item["id"]) if named else None
