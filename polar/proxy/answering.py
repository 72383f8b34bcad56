"""From a finished sample to what the harness is given: parsed, cut at its stop string, with ids of our making."""

from __future__ import annotations

import time
from dataclasses import replace

from polar.engines.base import Generation
from polar.messages import Answer, Message, ModelRequest
from polar.proxy.ledger import anchor
from polar.proxy.prepare import offered
from polar.renderers.base import Renderer


def read_answer(
    generation: Generation, request: ModelRequest, renderer: Renderer, completion_id: str, prompt_tokens: int
) -> tuple[Answer, tuple[str, ...]]:
    """The answer, and the flags of its completion."""
    parsed = renderer.parse(generation.output_ids, offered(request))
    message, flags = parsed.message, list(parsed.flags)
    if isinstance(generation.matched_stop, str):
        # The sampled ids keep the stop string, for they were sampled; a harness never gets to see it.
        message = _cut(message, generation.matched_stop)
        flags.append("stop_string")
    calls = tuple(replace(call, id=anchor(completion_id, index)) for index, call in enumerate(message.tool_calls))
    reason = generation.finish_reason
    shown = request.want_logprobs and generation.logprobs is not None
    answer = Answer(
        id=completion_id,
        model=request.model,
        message=replace(message, tool_calls=calls),
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(generation.output_ids),
        created=int(time.time()),
        token_texts=tuple(renderer.decode([token]) for token in generation.output_ids) if shown else (),
        logprobs=tuple(generation.logprobs or ()) if shown else (),
    )
    return answer, tuple(flags)


def _cut(message: Message, stop: str) -> Message:
    if stop in message.content:
        return replace(message, content=message.content[: message.content.rindex(stop)])
    if message.reasoning and stop in message.reasoning:
        return replace(message, reasoning=message.reasoning[: message.reasoning.rindex(stop)])
    return message
