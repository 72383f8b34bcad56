"""What a call needs before its engine is asked: budget, engine, prompt, sampling.

Decides what is sent; sends nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from polar.engines.logprobs import right_kinds
from polar.errors import BudgetError, EngineError
from polar.messages import ModelRequest, Sampling, Tool
from polar.proxy.aside import aside
from polar.proxy.canonical import prepared_chat
from polar.proxy.flights import Asked
from polar.proxy.ledger import Ledger, Place
from polar.proxy.limits import Limits
from polar.proxy.pool import EngineLink
from polar.proxy.rows import Prepared
from polar.proxy.sessions import Caller

UNKNOWN_CONTEXT = 32_768
"""Assumed of an engine that does not say its context length; what it cannot take it refuses by itself."""


async def prepare(asked: Asked, link: EngineLink, ledger: Ledger, place: Place, limits: Limits) -> Prepared:
    """The prompt of a call and how it is sampled. Raises SessionError."""
    request = asked.request
    if link.canonical:
        prepared = prepared_chat(asked, link, place)
        return replace(prepared, flags=logprob_flags(asked.caller, prepared.sampling))
    chars = sum(len(message.content) for message in request.messages[place.appended :])
    tools = offered(request)
    if asked.caller.strict and link.doubt:
        raise EngineError(link.doubt, code="renderer_refused")
    made = await aside(
        chars >= limits.aside_chars, lambda: ledger.prompt(place, request.messages, tools, link.renderer)
    )
    prompt = np.concatenate([made.prefix, made.suffix])
    sampling, marks = task_sampling(request.sampling, asked.caller, link, len(prompt)), []
    if sampling.json_schema is not None and not link.passport.constrains:
        sampling = replace(sampling, json_schema=None)
        marks.append("response_format")
    if not link.renderer.SEES_IMAGES and any(message.images for message in request.messages):
        marks.append("images_unseen")
    flags = logprob_flags(asked.caller, sampling)
    return Prepared(link, prompt, made.suffix, sampling, made.place, made.trim, tuple(marks), flags)


def logprob_flags(caller: Caller, sampling: Sampling) -> tuple[str, ...]:
    """`raw_logprobs` where the engine's are not of the distribution that this call is drawn from.

    A task that asks for such sampling is refused beforehand; of a harness that asks for it this tells."""
    needed = right_kinds(sampling)
    if needed is None or caller.logprob_kind not in ("raw", "tempered", "unknown"):
        return ()
    return () if caller.logprob_kind in needed[1] else ("raw_logprobs",)


def within_budget(caller: Caller) -> None:
    """Raises BudgetError once the session's turns or tokens are used up."""
    if caller.max_turns is not None and caller.turns >= caller.max_turns:
        raise BudgetError(f"this session may make {caller.max_turns} model calls and has made them", code="max_turns")
    if caller.max_session_tokens is not None and caller.sampled_tokens >= caller.max_session_tokens:
        message = f"this session may sample {caller.max_session_tokens} tokens and has sampled {caller.sampled_tokens}"
        raise BudgetError(message, code="max_session_tokens")


def task_sampling(asked: Sampling, caller: Caller, link: EngineLink, prompt_len: int) -> Sampling:
    """The task's sampling over the harness's, and no more tokens than the context and the budget have left.

    Engines refuse, or cut by a default of their own, what does not fit; so the number is always given."""
    chosen = asked.override(caller.sampling)
    room = (link.passport.context_length or UNKNOWN_CONTEXT) - prompt_len - 1
    limits = [room, chosen.max_tokens or room]
    if caller.max_session_tokens is not None:
        limits.append(caller.max_session_tokens - caller.sampled_tokens)
    return replace(chosen, max_tokens=min(limits))


def refuse_overflow(prepared: Prepared) -> None:
    """Raises EngineError for a prompt that leaves no room to answer, in words that harnesses look for."""
    length = prepared.link.passport.context_length or UNKNOWN_CONTEXT
    if len(prepared.prompt) + 1 >= length:
        message = (
            f"This model's maximum context length is {length} tokens. "
            f"However, your messages resulted in {len(prepared.prompt)} tokens."
        )
        raise EngineError(message, code="context_length_exceeded", status=400)


def offered(request: ModelRequest) -> tuple[Tool, ...]:
    """The tools that the model may call in this turn."""
    return () if request.tool_choice == "none" else request.tools


def seconds_left(caller: Caller, most: float, paused: float) -> float:
    """`most`, or what the session has left if that is less; `paused`: seconds of its call that do not count."""
    if caller.left is None:
        return most
    return max(0.0, min(most, caller.left + paused - (time.monotonic() - caller.read_at)))
