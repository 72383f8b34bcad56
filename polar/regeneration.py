"""Recorded calls asked anew: from each call's very prompt ids, what does another engine say, and where does it differ?

Reads completions as the REST API gives them and puts their prompts together again. Scoring traces is `scoring`'s
affair; so is which engine to ask the caller's. Two engines can be compared only if they share a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from polar.engines.base import Engine
from polar.messages import Sampling
from polar.scoring import neutral

How = Literal["auto", "recorded", "greedy"]
"""`recorded`: with the call's own sampling and seed. `greedy`: the likeliest token. `auto`: recorded where that can be
repeated, for the call was greedy or had a seed; else greedy."""
MAX_TOKENS = 4096
"""Of a call that recorded no limit and no output."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call as it was recorded."""

    completion_id: str
    turn: int
    prompt_ids: list[int] | None
    """None: the engine did not say what it was given, or the parent is not there."""
    output_ids: list[int]
    logprobs: list[float] | None
    sampled_with: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """A token and how likely it was."""

    id: int | None
    """None: this one had ended here."""
    logprob: float | None


@dataclass(slots=True)
class Regenerated:
    """One call beside another engine's answer to the same prompt."""

    completion_id: str
    turn: int
    tokens: int
    """That were recorded."""
    asked: str | None = None
    """How the other engine sampled: recorded or greedy; None if it was not asked."""
    same: bool | None = None
    """Every token, to the end; None if it was not asked."""
    position: int | None = None
    """Of the first token that differs."""
    recorded: Choice | None = None
    """What was recorded there."""
    other: Choice | None = None
    """What the other engine said instead."""
    recorded_by_other: float | None = None
    """How likely the recorded token was to the other engine."""
    before: list[int] | None = None
    """Ids of the answer before it, the last of them."""
    mean_difference: float | None = None
    """Between recorded log-probabilities and the other engine's, over the whole recorded answer."""
    reason: str | None = None
    """Why it was not asked, or not compared."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for programs."""
        return asdict(self)


def calls(completions: Iterable[Mapping[str, Any]]) -> list[Recorded]:
    """The answered calls of a session's last attempt, with their prompts put together: parent, its output, the rest."""
    rows = list(completions)
    last = max((row["attempt"] for row in rows), default=0)
    streams: dict[str, list[int]] = {}
    found: list[Recorded] = []
    for row in rows:
        if row["attempt"] != last:
            continue
        before = [] if row["parent_id"] is None else streams.get(row["parent_id"])
        prompt = None if before is None else before[: len(before) - row["trim"]] + row["suffix_ids"]
        if not prompt or len(prompt) != row["prompt_tokens"]:
            prompt = None
        else:
            streams[row["completion_id"]] = prompt + row["output_ids"]
        if row["outcome"] == "answered":
            told = row["sampled_with"]
            found.append(Recorded(row["completion_id"], len(found), prompt, row["output_ids"], row["logprobs"], told))
    return found


async def regenerate(engine: Engine, call: Recorded, how: How = "auto", context: int = 12) -> Regenerated:
    """Ask the engine for this call's answer once more. Raises EngineError."""
    found = Regenerated(call.completion_id, call.turn, len(call.output_ids))
    if call.prompt_ids is None or not call.output_ids:
        found.reason = "its prompt is not known" if call.prompt_ids is None else "it has no tokens"
        return found
    sampling, found.asked = _sampling(call, how)
    answer = await engine.generate(call.prompt_ids, sampling, request_id=f"replay-{call.completion_id}")
    prompt, mine, theirs = call.prompt_ids, call.output_ids, answer.output_ids
    scored = (await engine.score(prompt + mine))[len(prompt) :]
    if call.logprobs is not None and neutral(call.sampled_with):
        apart = np.abs(np.array(scored, float) - np.array(call.logprobs, float))
        found.mean_difference = float(apart.mean())
    at = next((place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if at is None and len(mine) != len(theirs):
        at = min(len(mine), len(theirs))
    found.same = at is None
    if at is not None:
        found.position, found.before = at, mine[max(0, at - context) : at]
        found.recorded, found.other = _choice(mine, call.logprobs, at), _choice(theirs, answer.logprobs, at)
        found.recorded_by_other = scored[at] if at < len(scored) else None
    return found


def _choice(ids: list[int], logprobs: list[float] | None, at: int) -> Choice:
    if at >= len(ids):
        return Choice(None, None)
    return Choice(ids[at], None if logprobs is None else logprobs[at])


def _sampling(call: Recorded, how: How) -> tuple[Sampling, str]:
    known = {each.name for each in fields(Sampling)}
    told = {name: value for name, value in call.sampled_with.items() if name in known}
    told["stop"] = tuple(told.get("stop") or ())
    # Not one token more than was recorded: what comes after that has nothing to be compared with.
    told["max_tokens"] = len(call.output_ids) or MAX_TOKENS
    repeatable = told.get("temperature") == 0 or told.get("seed") is not None
    if how == "recorded" or (how == "auto" and repeatable):
        return Sampling(**told), "recorded"
    limits = {name: told[name] for name in ("max_tokens", "stop", "json_schema") if told.get(name) is not None}
    return Sampling(temperature=0.0, **limits), "greedy"
