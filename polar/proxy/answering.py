"""From a finished sample to what the harness is given: parsed, cut at its stop string, with ids of our making."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from polar.engines.base import Generation
from polar.messages import Answer, Message, ModelRequest, ToolCall
from polar.proxy.ledger import Ids, anchor
from polar.proxy.prepare import offered
from polar.renderers.base import TAIL, Parsed, Piece, Renderer, TextPieces
from polar.renderers.layout import held_back


def read_answer(
    generation: Generation, request: ModelRequest, renderer: Renderer, completion_id: str, prompt: Ids
) -> tuple[Answer, tuple[str, ...]]:
    """The answer, and the flags of its completion."""
    if generation.message is None:
        parsed = renderer.parse(generation.output_ids, offered(request), prompt[-TAIL:].tolist())
    else:
        parsed = Parsed(generation.message)  # the engine's own reading, in canonical mode
    message, flags, stopped = parsed.message, list(parsed.flags), None
    if isinstance(generation.matched_stop, str):
        # The sampled ids keep the stop string, for they were sampled; a harness never gets to see it.
        message = _cut(message, generation.matched_stop)
        flags.append("stop_string")
        stopped = generation.matched_stop
    calls = tuple(replace(call, id=anchor(completion_id, index)) for index, call in enumerate(message.tool_calls))
    reason = generation.finish_reason
    shown = request.want_logprobs and generation.logprobs is not None
    answer = Answer(
        id=completion_id,
        model=request.model,
        message=replace(message, tool_calls=calls) if calls else message,
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
        prompt_tokens=len(prompt) or generation.prompt_tokens or 0,
        completion_tokens=generation.sampled,
        created=int(time.time()),
        token_texts=tuple(renderer.decode([token]) for token in generation.output_ids) if shown else (),
        logprobs=tuple(generation.logprobs or ()) if shown else (),
        stop_sequence=stopped,
        cached_tokens=int(generation.timings.get("cached_tokens") or 0),
        reasoning_tokens=renderer.count(message.reasoning) if message.reasoning else 0,
    )
    return answer, tuple(flags)


class Shown:
    """What of an output may be streamed: what its renderer gives out, but for what may yet be a stop string."""

    def __init__(self, pieces: TextPieces, stops: tuple[str, ...], completion_id: str) -> None:
        self._pieces = pieces
        self._stops = stops
        self._completion_id = completion_id
        self._calls = 0
        self._kind: Literal["reasoning", "text"] = "reasoning"
        self._held = ""
        self._stopped = False

    def feed(self, ids: list[int]) -> list[Piece]:
        """New pieces after `ids`, in order; tool calls have the ids that the answer will have."""
        found: list[Piece] = []
        for piece in self._pieces.feed(ids):
            if self._stopped:
                break
            if isinstance(piece, ToolCall):
                found += self._let_go()
                found.append(replace(piece, id=anchor(self._completion_id, self._calls)))
                self._calls += 1
            else:
                found += self._text(*piece)
        return found

    def _text(self, kind: Literal["reasoning", "text"], text: str) -> list[Piece]:
        found = self._let_go() if kind != self._kind else []
        self._kind, self._held = kind, self._held + text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self._stopped = bool(places)
        certain = min(places) if places else len(self._held) - held_back(self._held, self._stops)
        if certain:
            found.append((kind, self._held[:certain]))
        self._held = self._held[certain:]
        return found

    def _let_go(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [(self._kind, held)] if held else []


def _cut(message: Message, stop: str) -> Message:
    if stop in message.content:
        return replace(message, content=message.content[: message.content.rindex(stop)])
    if message.reasoning and stop in message.reasoning:
        return replace(message, reasoning=message.reasoning[: message.reasoning.rindex(stop)])
    return message
