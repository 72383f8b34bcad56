"""Do an engine's weights still give the log-probabilities that it sampled with? Captured tokens, scored again.

A weight push can go wrong while the engine answers 200: the gap between what was recorded and what a forward pass
gives now shows it. Where the samples come from is the caller's affair; they must be of the weights in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polar.engines.base import Engine
from polar.errors import EngineError

TOKENS = 64
"""Enough to tell wrong weights, and a moment's work for any engine."""
ALARM = 1e-2
"""Largest mean difference that half precision explains; of single precision 1e-4 is."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded answer that was sampled from the policy as it is: temperature 1, nothing cut."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    name: str = ""
    """Of what it was taken from."""


@dataclass(frozen=True, slots=True)
class Parity:
    """How far the engine is from what it said before."""

    tokens: int
    mean: float
    """Mean absolute difference, in nats."""
    worst: float
    alarm: float
    worst_sample: str = ""

    @property
    def well(self) -> bool:
        """Within the threshold; with nothing to compare there is no verdict, and so none that is well."""
        return self.tokens > 0 and self.mean <= self.alarm

    def record(self) -> dict[str, Any]:
        """For the log, the API and a person."""
        return {
            "tokens": self.tokens,
            "mean": self.mean,
            "worst": self.worst,
            "alarm": self.alarm,
            "worst_sample": self.worst_sample,
            "well": self.well,
        }


async def check(engine: Engine, samples: Sequence[Sample], *, tokens: int = TOKENS, alarm: float = ALARM) -> Parity:
    """Score `tokens` of the samples' tokens and compare. Raises EngineError; code `no_score` where it cannot score."""
    differences: list[float] = []
    worst, worst_sample = 0.0, ""
    for sample in samples:
        count = min(len(sample.output_ids), tokens - len(differences))
        if count <= 0:
            continue
        ids = [*sample.prompt_ids, *sample.output_ids[:count]]
        found = (await engine.score(ids))[len(sample.prompt_ids) :]
        if len(found) != count or any(value is None for value in found):
            raise EngineError("the engine did not score every token that it was asked to", code="engine_contract")
        gaps = np.abs(np.asarray(found, dtype=float) - np.asarray(sample.logprobs[:count], dtype=float))
        # A NaN must not pass for no difference.
        gaps = np.where(np.isnan(gaps), np.inf, gaps)
        if gaps.max() > worst:
            worst, worst_sample = float(gaps.max()), sample.name
        differences += gaps.tolist()
    mean = float(np.mean(differences)) if differences else 0.0
    return Parity(len(differences), mean, worst, alarm, worst_sample)
