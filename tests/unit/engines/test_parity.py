"""Parity: the gap between what was recorded and what the engine gives now."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from polar.engines.parity import ALARM, Parity, Sample, check
from tests.unit.engines.test_probe import LOGITS, Sampler, log_softmax

RIGHT = log_softmax(LOGITS)


def sample(shift: float = 0.0, name: str = "a", length: int = 10) -> Sample:
    """An answer whose recorded log-probabilities are off by `shift`."""
    ids = [number % 5 for number in range(length)]
    return Sample([1, 2], ids, [float(RIGHT[token]) + shift for token in ids], name)


def run(*samples: Sample, tokens: int = 64) -> Parity:
    """The comparison."""
    return asyncio.run(check(Sampler("processed"), samples, tokens=tokens))


def test_equal_weights_are_well() -> None:
    """Nothing but rounding between the same weights."""
    found = run(sample(), sample())
    assert (found.tokens, found.well) == (20, True)
    assert found.worst < 1e-9


def test_other_weights_raise_the_alarm() -> None:
    """A gap is told with its size and with what shows it."""
    found = run(sample(), sample(0.5, "b"))
    assert not found.well
    assert found.mean == pytest.approx(0.25)
    assert (found.worst, found.worst_sample) == (pytest.approx(0.5), "b")
    assert found.record()["alarm"] == ALARM


def test_no_more_tokens_than_asked() -> None:
    """A long answer is compared in part."""
    assert run(sample(length=50), sample(), tokens=7).tokens == 7


def test_nothing_to_compare_is_not_well() -> None:
    """Without tokens there is no verdict."""
    assert not run().well


def test_a_nan_is_a_gap() -> None:
    """A recorded value that is no number never passes."""
    broken = Sample([1], [2, 3], [math.nan, float(RIGHT[3])])
    found = run(broken)
    assert not found.well
    assert np.isinf(found.worst)
