"""The inside language: what any dialect's request and answer become between the wire and the tokens.

Plain values without I/O. Dialects translate to and from these; renderers turn them into token ids;
the ledger compares them. What a dialect did not understand is kept in the record of the request, not here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import orjson

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


VOLATILE = re.compile(
    r"\b(?:today'?s date|(?:current|local|today'?s) (?:date|time|datetime|day)|date and time|today is|"
    r"(?:the )?(?:date|time) is|now:)|billing-header",
    re.IGNORECASE,
)
"""In a line of a system message: it is another each turn, and means no other conversation."""
HINTS = ("today", "current ", "local ", "date and time", "date is", "time is", "now:", "billing-header")
"""One of these is in every line that VOLATILE finds; to look for them first takes a tenth of the time."""


@lru_cache(maxsize=256)
def steady(text: str) -> str:
    """A system message without its lines that change by themselves."""
    lines = text.split("\n")
    for number, folded in enumerate(text.casefold().split("\n")):
        if any(map(folded.__contains__, HINTS)) and VOLATILE.search(lines[number]):
            lines[number] = ""
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool by the model."""

    id: str
    name: str
    arguments: str
    """JSON text of the arguments as the model wrote it, or as the harness echoed it."""

    def canonical(self) -> tuple[str, str]:
        """Name and arguments with key order and spacing removed: harnesses re-serialise what we served."""
        try:
            arguments = orjson.dumps(orjson.loads(self.arguments or "{}"), option=orjson.OPT_SORT_KEYS).decode()
        except orjson.JSONDecodeError:
            arguments = self.arguments.strip()
        return self.name, arguments


MEDIA = "polar-media:"
"""What a reference to a stored picture begins with; `GET /rollout/media/<digest>` gives it."""


@lru_cache(maxsize=64)
def _content(source: str) -> tuple[str, str, bytes | None]:
    """Digest, media type and bytes of a picture's source."""
    head, comma, text = source.partition(",")
    if head.startswith("data:") and comma and head.endswith(";base64"):
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            return hashlib.sha256(source.encode()).hexdigest(), "", None
        return hashlib.sha256(data).hexdigest(), head.removeprefix("data:").partition(";")[0], data
    return hashlib.sha256(source.encode()).hexdigest(), "", None


@dataclass(frozen=True, slots=True)
class Image:
    """A picture inside a message's content, at its place among the text."""

    source: str
    """A URL; a data: URL where the bytes came with the request."""
    start: int
    end: int
    """content[start:end] stands for it before a model that sees no images."""

    def digest(self) -> str:
        """Names the picture: the SHA-256 of its bytes, or of its URL where the bytes did not come along."""
        return _content(self.source)[0]

    def content(self) -> tuple[str, bytes] | None:
        """Media type and bytes, where they came along."""
        _, media_type, data = _content(self.source)
        return None if data is None else (media_type, data)

    def reference(self) -> str:
        """How it is named where messages are kept: the picture itself is stored once, by its digest."""
        return self.source if self.content() is None else f"{MEDIA}{self.digest()}"


BRIEF = 2000
"""Characters of a message up to which it is worth remembering."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str = ""
    """What a model that reads text alone is shown; where `images` are, words stand in their place."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    images: tuple[Image, ...] = ()
    is_error: bool = False
    """Of a tool's result: the tool failed. What it said is in `content` either way."""
    anchor: str | None = None
    """The end of the id of the completion that this message is, where the harness returned an id or signature of ours
    that is not a tool call's."""
    _canonical: bytes | None = field(default=None, init=False, compare=False, repr=False)

    def canonical(self) -> bytes:
        """What must be equal for two messages to be the same message.

        Reasoning and tool-call ids are left out: harnesses drop the one and rewrite the other, and neither changes
        what a template prints for a message that was not sampled. Of an answer all white space is left out, for its
        tokens are on record however a harness breaks its text; of a system message, lines that tell the time."""
        if self._canonical is None:
            object.__setattr__(self, "_canonical", self._as_canonical())
        assert self._canonical is not None
        return self._canonical

    def _as_canonical(self) -> bytes:
        calls = [call.canonical() for call in self.tool_calls]
        if self.role == "assistant":
            text = "".join(self.content.split())
        else:
            text = (steady(self.content) if self.role == "system" else self.content).strip()
        return orjson.dumps([self.role, text, calls, *(image.digest() for image in self.images)])

    def chat_form(self) -> dict[str, Any]:
        """As OpenAI Chat writes it: the form in which messages are kept and shown."""
        form: dict[str, Any] = {"role": self.role, "content": self._parts() if self.images else self.content}
        if self.reasoning:
            form["reasoning_content"] = self.reasoning
        if self.tool_calls:
            form["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            form["tool_call_id"] = self.tool_call_id
        if self.is_error:
            form["is_error"] = True
        return form

    def _parts(self) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        place = 0
        for image in self.images:
            if before := self.content[place : image.start]:
                parts.append({"type": "text", "text": before})
            parts.append({"type": "image_url", "image_url": {"url": image.reference()}})
            place = image.end
        rest = self.content[place:]
        return [*parts, {"type": "text", "text": rest}] if rest else parts

    @classmethod
    def from_chat_form(cls, form: dict[str, Any]) -> Message:
        """The inverse of `chat_form`; what harnesses send is read by the dialect instead."""
        functions = [(call["id"], call["function"]) for call in form.get("tool_calls", ())]
        return cls(
            role=form["role"],
            content=form["content"],
            reasoning=form.get("reasoning_content"),
            tool_calls=tuple(ToolCall(id_, function["name"], function["arguments"]) for id_, function in functions),
            tool_call_id=form.get("tool_call_id"),
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool offered to the model."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    """The function object as the harness sent it, key order included: templates print it."""
    kind: str = "function"
    """What it is on the wire, where that is not a function: the dialect that offered it turns calls back into that."""
    wire_name: str | None = None
    """Its name on the wire where that is not `name`."""
    namespace: str | None = None
    """The group that it was offered in, where the wire has groups."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next tokens are drawn. None means: the engine's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: str | None = None
    """JSON text of the schema that the answer must satisfy; of the empty one, for any JSON object."""

    def override(self, task: dict[str, Any]) -> Sampling:
        """The task's sampling spec wins, so that data is on-policy; limits only ever get tighter."""
        chosen = {key: value for key, value in task.items() if value is not None}
        cap = chosen.pop("max_tokens", None)
        merged = replace(self, **chosen) if chosen else self
        if cap is not None:
            merged = replace(merged, max_tokens=min(cap, merged.max_tokens or cap))
        return merged

    def asked(self) -> dict[str, Any]:
        """Only what was set, for the record."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value not in (None, ())}


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A harness's model call, parsed."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    sampling: Sampling = Sampling()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    want_logprobs: bool = False
    top_logprobs: int = 0
    marks: tuple[str, ...] = ()
    """What this request asks that cannot be honoured in full, one word each; kept on the completion."""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The body, for what a dialect repeats in its answers."""

    def tool(self, name: str) -> Tool | None:
        """The tool that the model calls by this name."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def fingerprint(self) -> bytes:
        """Hash of everything before the first message: a change here is another conversation."""
        head = [[t.raw or [t.name, t.description, t.parameters] for t in self.tools], self.tool_choice == "none"]
        return hashlib.sha256(orjson.dumps(head)).digest()


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back to the harness: the parsed output with its accounting."""

    id: str
    model: str
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    created: int
    token_texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    stop_sequence: str | None = None
    """The stop string that ended it."""
    cached_tokens: int = 0
    """Of the prompt's, those that the engine had at hand."""
    reasoning_tokens: int = 0


@lru_cache(maxsize=8192)
def brief(role: Role, content: str) -> Message:
    """A message of a few words, the same object whenever it is said again: a harness sends its history each turn."""
    return Message(role, content)


def plain_message(role: Role, content: str) -> Message:
    """A message that is nothing but a text."""
    return brief(role, content) if len(content) <= BRIEF else Message(role, content)


def with_tool_names(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The same messages, each tool's result with the name of the tool: some families print it, few wires carry it."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and not message.name and (name := names.get(message.tool_call_id or "")):
            message = replace(message, name=name)
        found.append(message)
    return tuple(found)


def chain_step(digest: bytes, message: Message) -> bytes:
    """The name of a conversation that `message` extends; 16 bytes."""
    return hashlib.blake2b(digest + message.canonical(), digest_size=16).digest()


def hash_chain(fingerprint: bytes, messages: tuple[Message, ...]) -> list[bytes]:
    """`chain[i]` names the conversation up to and including message i; one pass, 16 bytes each."""
    chain, digest = [], fingerprint
    for message in messages:
        digest = chain_step(digest, message)
        chain.append(digest)
    return chain
