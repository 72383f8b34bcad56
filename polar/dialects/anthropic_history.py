"""Anthropic's `system` and `messages` as the inside language has them.

A tool's result is a block of a user message there and a message of its own here; consecutive entries of one role
are one turn there, so they become one message. Blocks that stand for what Anthropic's own servers do are kept as
words and marked: the model that answers here never did any of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.dialects.anthropic_tools import Toolbox, read_tool
from polar.dialects.content import Content, data_url
from polar.dialects.reading import listed, mapping, required, string, wrong
from polar.dialects.seals import item_anchor, unseal
from polar.messages import Message, Role, ToolCall, plain_message

BILLING = "x-anthropic-billing-header:"
"""A line that Claude Code puts before its system prompt. It is for Anthropic's accounts and changes from turn to turn,
which would make each turn a conversation of its own."""
ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
UNSHOWN = frozenset({"type", "cache_control", "citations", "signature", "caller"})
"""Fields of a block that say nothing to a model; whatever is encrypted says as little."""
LONGEST = 20_000
"""Characters of a block that is kept as words."""


def conversation(body: dict[str, Any], box: Toolbox, marks: list[str]) -> tuple[Message, ...]:
    """All messages of a request, the system prompt first. Raises BadRequest."""
    entries = listed(body.get("messages"), "messages")
    if not entries:
        raise wrong("messages", "at least one message is required")
    history = History(box, marks)
    history.prompt(body.get("system"))
    for index, entry in enumerate(entries):
        history.entry(mapping(entry, f"messages[{index}]"), f"messages[{index}]")
    messages = history.done()
    if messages[-1].role == "assistant":
        # Anthropic's models went on from what was put into their mouth; here they answer anew after it.
        marks.append("prefill")
    return messages


@dataclass(slots=True)
class Draft:
    """A message as it grows."""

    role: Role
    content: Content = field(default_factory=Content)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    anchor: str | None = None
    tool_call_id: str | None = None
    is_error: bool = False

    def origin(self) -> str | None:
        """The completion that this message is, as far as its ids tell."""
        named = (item_anchor(call.id) for call in self.calls)
        return self.anchor or next(filter(None, named), None)

    def message(self) -> Message:
        """The message that it has become."""
        if not (
            self.thoughts or self.calls or self.anchor or self.tool_call_id or self.content.images or self.is_error
        ):
            return plain_message(self.role, self.content.text)
        return Message(
            role=self.role,
            content=self.content.text,
            reasoning="\n".join(self.thoughts) or None,
            tool_calls=tuple(self.calls),
            tool_call_id=self.tool_call_id,
            images=tuple(self.content.images),
            is_error=self.is_error,
            anchor=self.anchor,
        )


class History:
    """Messages in order, the last one still open for more of its role."""

    def __init__(self, box: Toolbox, marks: list[str]) -> None:
        self._box = box
        self._marks = marks
        self._messages: list[Message] = []
        self._open: Draft | None = None

    def prompt(self, system: Any) -> None:
        """The system prompt: a text or blocks of text."""
        for block, where in _blocks(system, "system"):
            text = block.get("text")
            if isinstance(text, str) and text.startswith(BILLING):
                self._marks.append("billing_header")
                block = {**block, "text": text.partition("\n")[2]}
                if not block["text"]:
                    continue
            self._block(self._draft("system"), block, where)
        self._close()

    def entry(self, entry: dict[str, Any], where: str) -> None:
        """One entry of `messages`."""
        said = entry.get("role")
        role = ROLES.get(said) if isinstance(said, str) else None
        if role is None:
            raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {said!r}")
        blocks = _blocks(entry.get("content"), f"{where}.content")
        if role == "assistant":
            self._assistant(blocks)
            return
        if not blocks:
            self._draft(role)
        for block, place in blocks:
            if block.get("type") == "tool_result":
                self._result(block, place)
            else:
                self._block(self._draft(role), block, place)

    def done(self) -> tuple[Message, ...]:
        """All of them."""
        self._close()
        return tuple(self._messages)

    def _assistant(self, blocks: list[tuple[dict[str, Any], str]]) -> None:
        draft = Draft("assistant")
        for block, where in blocks:
            self._sampled(draft, block, where)
        before = self._open
        if before is None or before.role != "assistant" or _apart(before, draft):
            self._close()
            self._open = draft
            return
        # Read once more into the open message, so that pictures keep their places in its text.
        for block, where in blocks:
            self._sampled(before, block, where)

    def _sampled(self, draft: Draft, block: dict[str, Any], where: str) -> None:
        """A block of the model's own turn."""
        kind = block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            self._thinking(draft, block, where)
        elif kind == "tool_use":
            draft.calls.append(_call(block, where))
        else:
            self._block(draft, block, where)

    def _thinking(self, draft: Draft, block: dict[str, Any], where: str) -> None:
        name = "signature" if block.get("type") == "thinking" else "data"
        seal = unseal(string(block.get(name), f"{where}.{name}"))
        thought = string(block.get("thinking"), f"{where}.thinking")
        if seal is not None:
            draft.anchor = draft.anchor or seal.anchor
            thought = thought or seal.reasoning
        elif not thought:
            self._marks.append("thinking_unread")
        if thought:
            draft.thoughts.append(thought)

    def _result(self, block: dict[str, Any], where: str) -> None:
        self._close()
        self._open = draft = Draft("tool", tool_call_id=required(block, "tool_use_id", f"{where}."))
        draft.is_error = block.get("is_error") is True
        for part, place in _blocks(block.get("content"), f"{where}.content"):
            self._block(draft, part, place)
        self._close()

    def _block(self, draft: Draft, block: dict[str, Any], where: str) -> None:
        kind = block.get("type")
        if kind == "tool_reference":
            draft.content.add(self._loaded(required(block, "tool_name", f"{where}.")))
            return
        if kind in ("tool_addition", "tool_removal"):
            self._change(
                draft, mapping(block.get("tool"), f"{where}.tool"), f"{where}.tool", gone=kind == "tool_removal"
            )
            return
        before = len(draft.content.marks)
        _show(draft.content, block, where)
        self._marks += draft.content.marks[before:]

    def _loaded(self, name: str) -> str:
        """A tool that was held back until now is described where it is brought; one that the model knows is named."""
        tool = self._box.deferred.get(name)
        return f"<function>{orjson.dumps(tool.raw).decode()}</function>" if tool else f"[tool: {name}]"

    def _change(self, draft: Draft, tool: dict[str, Any], where: str, *, gone: bool) -> None:
        """A tool that comes, or goes, in mid-conversation."""
        name = tool.get("name")
        definition = tool.get("definition")
        if definition is not None:
            described = read_tool(mapping(definition, f"{where}.definition"), f"{where}.definition", self._marks)
            if described is None:
                return
            name = described.name
            self._box.deferred[name] = described
        if not isinstance(name, str):
            draft.content.add(f"[{'tool removed' if gone else 'tool'}: {_words(tool)}]")
            self._marks.append("block_as_words")
            return
        draft.content.add(f"[tool removed: {name}]" if gone else self._loaded(name))

    def _draft(self, role: Role) -> Draft:
        if self._open is None or self._open.role != role:
            self._close()
            self._open = Draft(role)
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._messages.append(self._open.message())
            self._open = None


def _apart(one: Draft, other: Draft) -> bool:
    """Whether these are two answers of ours: merged, the second would be lost behind the first one's id."""
    names = one.origin(), other.origin()
    return None not in names and names[0] != names[1]


def _blocks(value: Any, field: str) -> list[tuple[dict[str, Any], str]]:
    """Each block with its path; a text is one block."""
    if value is None:
        return []
    if isinstance(value, str):
        return [({"type": "text", "text": value}, field)]
    if not isinstance(value, list):
        raise wrong(field, "must be a string or a list of blocks")
    return [(mapping(block, f"{field}[{i}]"), f"{field}[{i}]") for i, block in enumerate(value)]


def _call(block: dict[str, Any], where: str) -> ToolCall:
    given = block.get("input")
    arguments = given if isinstance(given, str) else orjson.dumps(given or {}).decode()
    return ToolCall(string(block.get("id"), f"{where}.id"), required(block, "name", f"{where}."), arguments)


def _show(content: Content, block: dict[str, Any], where: str) -> None:
    """A block that is no part of a tool call."""
    kind = required(block, "type", f"{where}.")
    if kind == "text":
        content.add(string(block.get("text"), f"{where}.text"))
    elif kind == "image":
        _image(content, mapping(block.get("source"), f"{where}.source"), f"{where}.source")
    elif kind == "document":
        _document(content, block, where)
    elif kind == "search_result":
        content.add(f"[search result: {string(block.get('title'), where)}, {string(block.get('source'), where)}]")
        for part, place in _blocks(block.get("content"), f"{where}.content"):
            _show(content, part, place)
    elif kind == "compaction":
        content.add(string(block.get("content"), f"{where}.content"))
    elif kind == "container_upload":
        content.unread(f"uploaded file {string(block.get('file_id'), f'{where}.file_id')}")
    else:
        content.add(f"[{kind}: {_words(block)}]")
        content.marks.append("block_as_words")


def _image(content: Content, source: dict[str, Any], where: str) -> None:
    kind = source.get("type")
    if kind == "base64":
        media_type = string(source.get("media_type"), f"{where}.media_type")
        content.picture(data_url(media_type, required(source, "data", f"{where}.")))
    elif kind == "url":
        content.picture(required(source, "url", f"{where}."))
    elif kind == "file":
        content.unread(f"image: file {string(source.get('file_id'), f'{where}.file_id')}")
    else:
        raise wrong(f"{where}.type", f"images from {kind!r} are unknown; there are base64, url and file")


def _document(content: Content, block: dict[str, Any], where: str) -> None:
    title = string(block.get("title"), f"{where}.title") or "untitled"
    content.add(string(block.get("context"), f"{where}.context"))
    source = mapping(block.get("source"), f"{where}.source")
    kind = source.get("type")
    if kind == "base64":
        media_type = string(source.get("media_type"), f"{where}.source.media_type")
        content.document(title, media_type, string(source.get("data"), f"{where}.source.data"))
    elif kind in ("text", "content"):
        name = "data" if kind == "text" else "content"
        content.add(f"[document: {title}]")
        for part, place in _blocks(source.get(name), f"{where}.source.{name}"):
            _show(content, part, place)
    elif kind in ("url", "file"):
        name = "url" if kind == "url" else "file_id"
        content.unread(f"document: {title}, {string(source.get(name), f'{where}.source.{name}')}")
    else:
        raise wrong(f"{where}.source.type", f"there is no {kind!r} here but base64, text, content, url and file")


def _words(block: dict[str, Any]) -> str:
    """A block without a reader of its own, as compact JSON."""
    return orjson.dumps(_shown(block)).decode()[:LONGEST]


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _shown(item) for key, item in value.items() if not key.startswith("encrypted")}
        return {key: item for key, item in kept.items() if key not in UNSHOWN}
    return [_shown(item) for item in value] if isinstance(value, list) else value
