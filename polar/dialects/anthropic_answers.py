"""An answer as Anthropic writes it: content blocks in the order thinking, text, tool calls; whole or as events.

A thinking block's signature is our seal, so that a client which must send it back names the completion with it.
Where a client wants no thinking shown, the seal carries it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import orjson

from polar.dialects.base import Stream, sse
from polar.dialects.seals import item_id, seal
from polar.messages import Answer, FinishReason, ModelRequest, ToolCall

REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNREADABLE = "invalid_arguments"
"""Under this name a tool is given arguments that are no JSON object, as they are: the tool then refuses them in its
own words, where an empty input might be obeyed."""
PING_SECONDS = 5.0
PING = sse({"type": "ping"}, "ping")


def written(request: ModelRequest, answer: Answer) -> dict[str, Any]:
    """The whole message."""
    message = answer.message
    content: list[dict[str, Any]] = []
    if message.reasoning:
        hidden = omits(request)
        signature = seal(answer.id, message.reasoning if hidden else "")
        content.append({"type": "thinking", "thinking": "" if hidden else message.reasoning, "signature": signature})
    if message.content:
        content.append({"type": "text", "text": message.content, "citations": None})
    content += [_tool_use(call, tool_input(call)) for call in message.tool_calls]
    return {
        **_head(answer.id, answer.model),
        "content": content,
        **_stopped(answer),
        "usage": usage(answer),
        **_managed(request),
    }


def omits(request: ModelRequest) -> bool:
    """Whether the client asked to be shown no thinking."""
    thinking = request.raw.get("thinking")
    return isinstance(thinking, dict) and thinking.get("display") == "omitted"


def tool_input(call: ToolCall) -> dict[str, Any]:
    """The arguments as an object."""
    try:
        value = orjson.loads(call.arguments or "{}")
    except orjson.JSONDecodeError:
        value = _lenient(call.arguments)
    return value if isinstance(value, dict) else {UNREADABLE: call.arguments}


def usage(answer: Answer) -> dict[str, Any]:
    """Anthropic's `input_tokens` are those that no cache had."""
    return {
        "input_tokens": max(0, answer.prompt_tokens - answer.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
    }


class MessagesStream(Stream):
    """`message_start`, the blocks, each with its start, deltas and stop, then `message_delta` and `message_stop`."""

    def __init__(self, request: ModelRequest, completion_id: str) -> None:
        super().__init__(request, completion_id)
        self._hidden = omits(request)
        self._index = -1
        self._kind: str | None = None
        """Of the block that is open."""
        self._thought: list[str] = []
        self._spoke = time.monotonic()

    def last(self, answers: list[Answer]) -> Iterator[bytes]:
        yield from self._close()
        answer = answers[0]
        yield _event("message_delta", delta=_stopped(answer), usage=usage(answer), **_managed(self.request))
        yield _event("message_stop")

    def _start(self, prompt_tokens: int) -> Iterator[bytes]:
        # What of the prompt was cached is known only at the end; message_delta then says it exactly.
        spent = {"input_tokens": prompt_tokens, "output_tokens": 0}
        spent |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        head = _head(self.completion_id, self.request.model)
        message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": spent}
        yield _event("message_start", message=message)

    def _reasoning(self, delta: str) -> Iterator[bytes]:
        yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
        self._thought.append(delta)
        if not self._hidden:
            yield self._delta({"type": "thinking_delta", "thinking": delta})
        elif time.monotonic() - self._spoke > PING_SECONDS:
            # The proxy keeps only a silent engine's stream alive, and this one is thinking aloud.
            self._spoke = time.monotonic()
            yield PING

    def _text(self, delta: str) -> Iterator[bytes]:
        yield from self._open({"type": "text", "text": "", "citations": None})
        yield self._delta({"type": "text_delta", "text": delta})

    def _call(self, index: int, call: ToolCall) -> Iterator[bytes]:
        yield from self._close()
        yield from self._open(_tool_use(call, {}))
        read = tool_input(call)
        # As the model wrote it: numbers and key order survive, which they need not in a parsed object.
        text = orjson.dumps(read).decode() if UNREADABLE in read else call.arguments or "{}"
        yield self._delta({"type": "input_json_delta", "partial_json": text})
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == block["type"]:
            return
        yield from self._close()
        self._index += 1
        self._kind = block["type"]
        self._spoke = time.monotonic()
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            kept = "".join(self._thought) if self._hidden else ""
            self._thought = []
            yield self._delta({"type": "signature_delta", "signature": seal(self.completion_id, kept)})
        self._kind = None
        yield _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _head(completion_id: str, model: str) -> dict[str, Any]:
    return {"id": item_id("msg", completion_id), "type": "message", "role": "assistant", "model": model}


def _stopped(answer: Answer) -> dict[str, Any]:
    reason = REASONS.get(answer.finish_reason, "end_turn")
    if answer.stop_sequence is not None and reason == "end_turn":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}
    return {"stop_reason": reason, "stop_sequence": None}


def _managed(request: ModelRequest) -> dict[str, Any]:
    """Who asked for edits of the context is told that there were none."""
    return {"context_management": {"applied_edits": []}} if request.raw.get("context_management") else {}


def _tool_use(call: ToolCall, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _lenient(arguments: str) -> Any:
    """JSON that holds half surrogate pairs, which a sampler can write and a wire cannot carry."""
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
        return orjson.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None
