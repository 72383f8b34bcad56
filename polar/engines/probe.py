"""Finding out what an engine can do by trying it: a few tokens, sampled and scored again.

What a server says of itself is its adapter's `passport`; what a task needs of an engine is `stages.fitness`'s.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from uuid import uuid4

from polar.engines.base import Engine, Generation, LogprobKind, Passport
from polar.errors import EngineError
from polar.messages import Message, ModelRequest, Sampling

PROMPT = [11, 12, 13, 14]
"""In every vocabulary."""
HOT = 2.0
"""At this temperature a token's log-probability differs from the model's own by far more than rounding."""
TOKENS = 8
NOISE = 0.1
"""Mean difference that two computations of the same log-probabilities in half precision stay below."""
POSITIVE = 1e-3
"""Above this a number is no logarithm of a probability."""
HELLO = ModelRequest("probe", (Message("user", "Say a few words."),))


async def probe(engine: Engine, *, canonical: bool = False) -> Passport:
    """The engine's passport, tried. Raises EngineError where the engine is away.

    A scripted engine is not tried: it answers only prompts that it knows, and its log-probabilities are zeros."""
    passport = await engine.passport()
    canonical = canonical or not engine.TAKES_IDS
    passport = replace(passport, ids_in=not canonical, streams_ids=engine.STREAMS_IDS and not canonical)
    if passport.scripted:
        return replace(passport, logprobs="none")
    hot = await _sample(engine, Sampling(temperature=HOT, max_tokens=TOKENS, seed=7), canonical)
    if hot is None or not hot.output_ids:
        return replace(passport, ids_out=False, logprobs="none")
    # Of the one token that top-k leaves, the processed log-probability is zero.
    cut = await _sample(engine, Sampling(temperature=HOT, top_k=1, max_tokens=2, seed=7), canonical)
    return replace(
        passport,
        ids_out=True,
        logprobs=await _kind(engine, hot, cut),
        weight_versions=bool(hot.policy_versions),
        prompt_ids_back=bool(hot.prompt_ids),
    )


async def _sample(engine: Engine, sampling: Sampling, canonical: bool) -> Generation | None:
    """One answer; None where its ids do not come, or where the engine refuses to be sampled like that."""
    request_id = f"probe-{uuid4().hex[:12]}"
    try:
        if canonical:
            return await engine.chat(HELLO, sampling, request_id=request_id)
        return await engine.generate(PROMPT, sampling, request_id=request_id)
    except EngineError as error:
        if error.code in ("no_token_ids", "engine_refused", "engine_contract") and not error.retryable:
            return None
        raise


async def _kind(engine: Engine, hot: Generation, cut: Generation | None) -> LogprobKind:
    if hot.logprobs is None or any(value > POSITIVE for value in hot.logprobs):
        return "none"
    # Zeros by themselves prove nothing, for a model may be certain of its first choice; scores tell.
    certain = cut is not None and bool(cut.logprobs) and all(abs(value) < NOISE for value in cut.logprobs or ())
    plain = await _plain(engine, hot)
    if plain is None:
        return "processed" if certain else "unknown"
    differs = mean(abs(a - b) for a, b in zip(hot.logprobs, plain, strict=True)) > NOISE
    if not differs:
        return "raw"
    return "processed" if certain else "tempered"


async def _plain(engine: Engine, hot: Generation) -> list[float] | None:
    """The model's own log-probabilities of the same tokens; None where the engine cannot score."""
    prompt = hot.prompt_ids or PROMPT
    try:
        scores = await engine.score([*prompt, *hot.output_ids])
    except EngineError as error:
        if error.retryable:
            raise
        return None
    found = [value for value in scores[len(prompt) :] if value is not None]
    return found if len(found) == len(hot.output_ids) else None
