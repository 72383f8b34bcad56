"""Canonical mode: the engine renders and parses, and the proxy records what it says that it saw and sampled.

For engines that take no ids, and for lanes that ask for it, be it to measure the drift that token mode does away
with. Such a completion has no parent in the ledger; builders link it by its tokens, where the engine gives them.
"""

from __future__ import annotations

from dataclasses import replace

from polar.errors import EngineError
from polar.messages import ModelRequest
from polar.proxy.flights import Asked
from polar.proxy.ledger import Place, as_ids
from polar.proxy.pool import EngineLink
from polar.proxy.rows import Prepared
from polar.renderers.base import Renderer

REASON = "canonical"


def prepared_chat(asked: Asked, link: EngineLink, place: Place) -> Prepared:
    """A call as it goes to a chat endpoint: messages instead of a prompt.

    How long the prompt is only the engine knows, so an answer is not limited to the room that the context has left;
    what does not fit the engine refuses by itself."""
    caller, marks = asked.caller, []
    sampling = asked.request.sampling.override(caller.sampling)
    if caller.max_session_tokens is not None:
        left = caller.max_session_tokens - caller.sampled_tokens
        sampling = replace(sampling, max_tokens=min(left, sampling.max_tokens or left))
    if sampling.json_schema is not None and not link.passport.constrains:
        sampling = replace(sampling, json_schema=None)
        marks.append("response_format")
    alone = replace(place, parent=None, reason=REASON, appended=0)
    none = as_ids([])
    return Prepared(link, none, none, sampling, alone, marks=tuple(marks), chat=asked.request)


def counted(request: ModelRequest, renderer: Renderer) -> int:
    """About how many tokens the prompt has; the engine's own template may print it otherwise."""
    try:
        return len(renderer.render(request.messages, request.tools))
    except EngineError:
        return sum(renderer.count(message.content) for message in request.messages)
