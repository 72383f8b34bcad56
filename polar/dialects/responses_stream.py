"""The event stream of the Responses API: each item opened, filled and closed, then the whole response.

Every event has a rising number, and every item that is closed here stands in the response at the end just so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from polar.dialects import responses_output as made
from polar.dialects import responses_tools
from polar.dialects.base import Dialect, Stream, sse
from polar.messages import Answer, ModelRequest, ToolCall

WRITTEN = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""Calls whose text is sent as deltas: the field, and the name of the events."""


class ResponsesStream(Stream):
    """Writes the events of one response."""

    def __init__(self, request: ModelRequest, completion_id: str) -> None:
        super().__init__(request, completion_id)
        self._created = int(time.time())
        self._number = 0
        self._done: list[dict[str, Any]] = []
        """The items that are closed."""
        self._open: str | None = None
        """The kind of the item that is being filled."""
        self._id = ""
        self._answer: Answer | None = None
        """Once it is whole."""
        self._thought = ""
        self._said = ""
        self._summary = made.summarised(request)
        self._sealed = made.compacts(request)
        """Nothing of a summary for later is shown while it is written."""

    def call(self, call: ToolCall) -> Iterator[bytes]:
        # The text before a call has log-probabilities that are known only once all is sampled; so has its event.
        if not self._sealed and (self._answer is not None or not self.request.want_logprobs):
            yield from super().call(call)

    def finish(self, answers: list[Answer]) -> Iterator[bytes]:
        self._answer = answers[0]
        yield from super().finish(answers)

    def last(self, answers: list[Answer]) -> Iterator[bytes]:
        self._answer = answer = answers[0]
        yield from self._close()
        if not self._done:
            yield from self._only_item(answer)
        response = {**made.whole(self.request, answer, self._created), "output": self._done}
        yield self._event(f"response.{response['status']}", response=response)

    def broken(self, dialect: Dialect, status: int, code: str, message: str) -> bytes:
        error = made.failure(status, code, message)
        response = made.failed(self.request, self.completion_id, self._created, error)
        return self._event("response.failed", response=response)

    def _start(self, prompt_tokens: int) -> Iterator[bytes]:
        response = made.opened(self.request, self.completion_id, self._created)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def _reasoning(self, delta: str) -> Iterator[bytes]:
        if self._sealed:
            return
        if self._open != "reasoning":
            item = made.reasoning(self.request, self.completion_id, "")
            yield from self._begin("reasoning", {**item, "summary": [], **({} if self._summary else {"content": []})})
            if self._summary:
                part = {"type": "summary_text", "text": ""}
                yield self._of("response.reasoning_summary_part.added", summary_index=0, part=part)
            else:
                part = {"type": "reasoning_text", "text": ""}
                yield self._of("response.content_part.added", content_index=0, part=part)
        self._thought += delta
        if self._summary:
            yield self._of("response.reasoning_summary_text.delta", summary_index=0, delta=delta)
        else:
            yield self._of("response.reasoning_text.delta", content_index=0, delta=delta)

    def _text(self, delta: str) -> Iterator[bytes]:
        if self._sealed:
            return
        if self._open != "message":
            yield from self._close()
            yield from self._open_message()
        self._said += delta
        yield self._of("response.output_text.delta", content_index=0, delta=delta, logprobs=[])

    def _call(self, index: int, call: ToolCall) -> Iterator[bytes]:
        yield from self._close()
        item = responses_tools.item(self.request, call, self.completion_id, index)
        name, events = WRITTEN.get(item["type"], ("", ""))
        yield from self._begin("call", {**item, "status": "in_progress", **({name: ""} if name else {})})
        if name:
            yield self._of(f"{events}.delta", delta=item[name])
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            yield self._of(f"{events}.done", **named, **{name: item[name]})
        yield self._end(item)

    def _only_item(self, answer: Answer) -> Iterator[bytes]:
        """Of an answer without a word, or of a sealed one."""
        if self._sealed:
            (item,) = made.output(self.request, answer)
            yield from self._begin("compaction", item)
            yield self._end(item)
        else:
            yield from self._open_message()
            yield from self._close()

    def _open_message(self) -> Iterator[bytes]:
        self._said = ""
        item = self._message("in_progress", [])
        yield from self._begin("message", {**item, "content": []})
        yield self._of("response.content_part.added", content_index=0, part=item["content"][0])

    def _message(self, status: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        item = made.message(self.completion_id, self._said, status, tokens)
        before = sum(done["type"] == "message" for done in self._done)
        # Text after a call, which only a model that breaks off its own form writes, is an item of its own.
        return {**item, "id": f"{item['id']}_{before}"} if before else item

    def _begin(self, kind: str, item: dict[str, Any]) -> Iterator[bytes]:
        self._open, self._id = kind, item["id"]
        yield self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _end(self, item: dict[str, Any]) -> bytes:
        event = self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None
        return event

    def _close(self) -> Iterator[bytes]:
        """Close the reasoning or the message that is open."""
        if self._open == "reasoning":
            item = made.reasoning(self.request, self.completion_id, self._thought)
            yield from self._close_reasoning(item)
            yield self._end(item)
        elif self._open == "message":
            answer = self._answer
            tokens = made.logprobs(self.request, answer) if answer else []
            item = self._message(made.status(answer) if answer else "completed", tokens)
            yield self._of("response.output_text.done", content_index=0, text=self._said, logprobs=_plain(tokens))
            yield self._of("response.content_part.done", content_index=0, part=item["content"][0])
            yield self._end(item)

    def _close_reasoning(self, item: dict[str, Any]) -> Iterator[bytes]:
        if self._summary:
            yield self._of("response.reasoning_summary_text.done", summary_index=0, text=self._thought)
            yield self._of("response.reasoning_summary_part.done", summary_index=0, part=item["summary"][0])
        else:
            yield self._of("response.reasoning_text.done", content_index=0, text=self._thought)
            yield self._of("response.content_part.done", content_index=0, part=item["content"][0])

    def _of(self, kind: str, **fields: Any) -> bytes:
        """An event about the open item."""
        return self._event(kind, item_id=self._id, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = sse({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return event


def _plain(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities as the events have them, without bytes."""
    return [{name: value for name, value in token.items() if name != "bytes"} for token in tokens]
