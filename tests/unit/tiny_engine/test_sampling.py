"""Sampling: which tokens can come, and the log-probability that is answered for them."""

from __future__ import annotations

import numpy as np
import pytest

from polar.tiny_engine.model import log_softmax
from polar.tiny_engine.sampling import SamplingParams, sample

LOGITS = np.log(np.asarray([[0.5, 0.3, 0.15, 0.05]]))


def draw(params: SamplingParams, times: int = 200) -> dict[int, float]:
    """The distinct tokens of many draws, with their log-probabilities."""
    generator = np.random.default_rng(0)
    seen = {}
    for _ in range(times):
        (token,), (logprob,) = sample(LOGITS, [params], [generator])
        seen[token] = logprob
    return seen


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}),
        (SamplingParams(top_k=2), {0: 0.625, 1: 0.375}),
        (SamplingParams(top_p=0.7), {0: 0.625, 1: 0.375}),
        (SamplingParams(top_p=0.5), {0: 1.0}),
        (SamplingParams(min_p=0.25), {0: 0.5 / 0.95, 1: 0.3 / 0.95, 2: 0.15 / 0.95}),
        (SamplingParams(top_k=3, top_p=0.6), {0: 0.625, 1: 0.375}),
    ],
)
def test_logprob_is_of_the_distribution_sampled_from(params: SamplingParams, expected: dict[int, float]) -> None:
    """Only kept tokens come, each with its renormalised probability."""
    seen = draw(params)
    assert seen.keys() == expected.keys()
    for token, probability in expected.items():
        assert np.exp(seen[token]) == pytest.approx(probability)


def test_temperature_scales_before_anything_else() -> None:
    """The log-probability at temperature 0.5 is that of the tempered scores."""
    seen = draw(SamplingParams(temperature=0.5))
    assert seen[0] == pytest.approx(log_softmax(LOGITS[0] / 0.5)[0])


def test_greedy_answers_the_untempered_logprob() -> None:
    """Temperature 0 takes the best token and says its probability under the model."""
    assert draw(SamplingParams(temperature=0, top_k=1), 3) == {0: pytest.approx(np.log(0.5))}


def test_seed_fixes_the_draws_whatever_the_batch() -> None:
    """A seeded request gets the same tokens alone and beside another one."""
    params = SamplingParams()
    alone, beside, other = (np.random.default_rng(seed) for seed in (3, 3, 4))
    for _ in range(20):
        (token,), _ = sample(LOGITS, [params], [alone])
        tokens, _ = sample(np.repeat(LOGITS, 2, axis=0), [params, params], [other, beside])
        assert tokens[1] == token
