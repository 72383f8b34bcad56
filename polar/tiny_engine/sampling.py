"""Choosing the next token, and the log-probability under which it was chosen.

Knows sampling parameters and score rows only; stop conditions belong to `requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.tiny_engine.model import Floats, log_softmax


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled, in neither surface's names: a top_k of 0 and a top_p of 1 switch them off."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def restricted(self) -> bool:
        """Whether some tokens can be ruled out before the draw."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def restrict(logits: Floats, params: SamplingParams) -> Floats:
    """Rule out tokens of one tempered row: top-k first, then top-p over what is left, then min-p."""
    order = np.argsort(-logits, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    probs = np.exp(log_softmax(logits[order]))
    # A token stays while the mass before it is below top_p, so the first always stays.
    keep = np.cumsum(probs) - probs < params.top_p
    keep &= probs >= params.min_p * probs[0]
    out = np.full_like(logits, -np.inf)
    out[order[keep]] = logits[order[keep]]
    return out


def sample(
    logits: Floats, params: Sequence[SamplingParams], generators: Sequence[np.random.Generator]
) -> tuple[list[int], list[float]]:
    """One token a row, with its log-probability.

    The log-probability is of the distribution that the token was really drawn from: after temperature, top-k, top-p
    and min-p, renormalised. At temperature 0 the choice is greedy, the distribution would be a point, and the
    log-probability is the untempered one, as both real engines answer.
    """
    greedy = np.asarray([p.temperature <= 0 for p in params])
    temperatures = np.asarray([p.temperature if p.temperature > 0 else 1.0 for p in params])
    rows = logits.astype(np.float64) / temperatures[:, None]
    for i, p in enumerate(params):
        if p.restricted:
            rows[i] = restrict(rows[i], p)
    logprobs = log_softmax(rows)
    cumulative = np.cumsum(np.exp(logprobs), axis=-1)
    # One draw a token whatever the batch, so that a seeded request does not depend on its neighbours.
    draws = np.asarray([g.random() for g in generators]) * cumulative[:, -1]
    chosen = np.where(greedy, rows.argmax(axis=-1), (cumulative <= draws[:, None]).sum(axis=-1))
    return chosen.tolist(), logprobs[np.arange(len(chosen)), chosen].tolist()
