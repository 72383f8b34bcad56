"""What part each call of a session plays, as the whole session shows it.

The proxy marks what a call tells of itself. Here come the rules that need the others: a call without tools where the
main loop has tools, another model's name, a title asked for beside a loop, a conversation that a tool call of another
one began. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from polar.builders.base import Call

SIDE_WORK = re.compile(
    r"\b(?:generate|write|create|produce|suggest|come up with|give|provide|summari[sz]e|extract|classify|determine)\b"
    r"[^.\n]{0,80}\b(?:title|headline|topic|summary|recap|commit message|branch name|session name|suggestions?)\b",
    re.IGNORECASE,
)
"""How programs ask for a title or a summary, in their system message."""
LOOKED_AT = 600
"""Characters of a system message that are looked at."""
SHORTEST_ERRAND = 20
"""Characters from which on a text that stands in a tool call and begins a conversation is no coincidence."""


@dataclass(frozen=True, slots=True)
class Errand:
    """A text in a tool call, which a sub-agent might be given."""

    asked_by: str
    """The completion."""
    tool_call: str
    text: str


def assign(calls: list[Call], model_name: str | None) -> list[Call]:
    """The calls with their roles; what the proxy has marked stays as it is.

    `model_name`: what the harness was told to ask for."""
    loops = any(call.role == "main" and call.parent_id for call in calls)
    main_has_tools = _any_tools([call for call in calls if call.role == "main"])
    asked_for = {call.model_requested for call in calls}
    continued = Counter(call.parent_id for call in calls)
    errands: list[Errand] = []
    by_id: dict[str, Call] = {}
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        if call.role == "main":
            call = _placed(call, parent, errands, branched=continued[call.parent_id] > 1)
        if call.role == "main" and parent is None and call.id not in continued:
            if main_has_tools and not call.request.get("tools"):
                call = _marked(call, "auxiliary", "it has no tools, where the main loop has")
            elif model_name in asked_for and call.model_requested != model_name:
                call = _marked(call, "auxiliary", f"it asks for {call.model_requested}, not for {model_name}")
            elif loops and (found := _side_work(call)):
                call = _marked(call, "auxiliary", f"it asks for something aside: {found}")
        by_id[call.id] = call
        errands += _errands(call)
    return list(by_id.values())


def _any_tools(calls: list[Call]) -> bool:
    """Whether any of these calls was offered tools; of calls with the same, the first and shortest request is read."""
    first = {call.head or call.id: call for call in reversed(calls)}
    return any(call.request.get("tools") for call in reversed(first.values()))


def _placed(call: Call, parent: Call | None, errands: list[Errand], *, branched: bool) -> Call:
    if parent is not None:
        if parent.role == "subagent":
            told = parent.metadata
            reason = told.get("role_reason") or "it continues a sub-agent"
            return _marked(call, "subagent", reason, spawned_by=told.get("spawned_by"))
        if not branched:
            # A lone continuation is the main agent's own; its request need not be read to know that.
            return call
    opening = _opening(call) if parent is None else _appended(call, parent)
    for errand in reversed(errands):
        if errand.text in opening and not (parent is not None and _answered(call, errand)):
            reason = "a tool call began it with these words"
            return _marked(call, "subagent", reason, spawned_by=errand.asked_by)
    return call


def _side_work(call: Call) -> str | None:
    first = (call.request.get("messages") or [{"role": ""}])[0]
    found = SIDE_WORK.search(_text(first["content"])[:LOOKED_AT]) if first["role"] == "system" else None
    return found[0] if found else None


def _marked(call: Call, role: str, reason: str, **more: Any) -> Call:
    return replace(call, role=role, metadata={**call.metadata, "role_reason": reason, **more})


def _opening(call: Call) -> str:
    """What the user's part says before the first answer."""
    texts = []
    for message in call.request.get("messages") or []:
        if message["role"] == "assistant":
            break
        if message["role"] == "user":
            texts.append(_text(message["content"]))
    return "\n".join(texts)


def _appended(call: Call, parent: Call) -> str:
    """What the user's part says after the parent's request: an agent that was given its parent's history is told there
    what to do."""
    messages = (call.request.get("messages") or [])[parent.messages() :]
    return "\n".join(_text(message["content"]) for message in messages if message["role"] == "user")


def _answered(call: Call, errand: Errand) -> bool:
    """Whether the tool call has its result: then who asked goes on, and perhaps repeats what it said."""
    messages = call.request.get("messages") or []
    return any(message["role"] == "tool" and message.get("tool_call_id") == errand.tool_call for message in messages)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


def _errands(call: Call) -> Iterator[Errand]:
    """Texts in a call's tool calls that a sub-agent might be given."""
    for tool_call in call.answer.get("tool_calls") or []:
        try:
            arguments = orjson.loads(tool_call["function"]["arguments"])
        except orjson.JSONDecodeError:
            continue
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str) and len(value) >= SHORTEST_ERRAND:
                yield Errand(call.id, tool_call["id"], value)
