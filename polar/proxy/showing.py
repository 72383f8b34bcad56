"""A model call that ended, as figures and as a span in OpenTelemetry's words for generative AI.

Names, numbers and lengths only: no text and no key of any harness leaves here. The record is `rows`' affair.
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from polar import tracing
from polar.engines.base import Generation
from polar.proxy import metrics
from polar.proxy.flights import Asked
from polar.proxy.ledger import Place
from polar.proxy.parts import Parts
from polar.proxy.rows import Prepared


def show(
    asked: Asked,
    completion_id: str,
    place: Place,
    prepared: Prepared | None,
    call: Parts | None,
    generation: Generation | None,
    outcome: str,
    *,
    prompt: int,
    started: float,
    error: str | None,
) -> None:
    """Count a call that was begun at that monotonic time, and make its span if anybody wants one."""
    seconds, dialect = time.monotonic() - started, asked.dialect.name
    sampled = generation.sampled if generation else 0
    metrics.ended(dialect, outcome, place.reason, prompt, sampled, call.engine_seconds if call and call.tries else None)
    if outcome == "answered" and call is not None:
        metrics.added(dialect, max(0.0, seconds - call.seconds))
    if not tracing.on():
        return
    caller, passport = asked.caller, prepared.link.passport if prepared else None
    model = asked.request.model.replace(asked.secret, "[redacted]")  # whatever a harness took for a model's name
    sampling = prepared.sampling if prepared else asked.request.sampling
    server = urlsplit(str((caller.engine or {}).get("base_url", "")))
    facts: dict[str, tracing.Value | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": passport.engine if passport else str((caller.engine or {}).get("engine", "unknown")),
        "gen_ai.conversation.id": caller.id,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": asked.request.stream or None,
        "gen_ai.request.choice.count": asked.request.n if asked.request.n != 1 else None,
        "gen_ai.output.type": "text" if sampling.json_schema is None else "json",
        "gen_ai.response.id": completion_id,
        "gen_ai.response.model": passport.model if passport else None,
        "gen_ai.response.finish_reasons": (str(generation.finish_reason),) if generation else None,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": sampled,
        "gen_ai.usage.cache_read.input_tokens": generation.timings.get("cached_tokens") if generation else None,
        "server.address": server.hostname,
        "server.port": server.port,
        "polar.task": caller.task,
        "polar.lane": caller.lane,
        "polar.dialect": dialect,
        "polar.outcome": outcome,
        "polar.place": place.reason,
        "polar.role": asked.role.name,
        "polar.engine_seconds": call.engine_seconds if call else None,
    }
    tracing.call(caller.id, caller.attempt, f"chat {model}", seconds, facts, error)
