"""What a certificate says of one completion, for each thing that can be wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polar.builders.assemble import assemble
from polar.builders.base import Trace
from tests.unit.builders.conversations import child, ids, root


def trace_of(**changes: Any) -> Trace:
    return assemble([root("a", ids(1), ids(2, 3), **changes)], [True], [])


def logprobs(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"logprobs": None}, "missing_logprobs"),
        ({"logprobs": logprobs(-1)}, "missing_logprobs"),
        ({"logprobs": logprobs(-1, np.nan)}, "non_finite_logprobs"),
        ({"logprobs": logprobs(-np.inf, -1)}, "non_finite_logprobs"),
        ({"logprobs": logprobs(-1, -9999)}, "sentinel_logprobs"),
        ({"logprobs": logprobs(-1, 0.5)}, "positive_logprobs"),
        ({"outcome": "aborted"}, "aborted"),
        ({"finish_reason": "abort"}, "aborted"),
        ({"outcome": "failed"}, "failed"),
        ({"outcome": "asked"}, "unanswered"),
        ({"finish_reason": "length"}, "truncated"),
        ({"prompt_ids": ids()}, "missing_prompt_ids"),
        ({"metadata": {"n": 2}}, "several_answers"),
        ({"flags": ("raw_logprobs",)}, "raw_logprobs"),
    ],
)
def test_each_defect_has_its_flag(changes: dict[str, Any], flag: str) -> None:
    """A defect of a completion is named on its trace, and nothing else is."""
    assert [flag] == trace_of(**changes).certificate["flags"]


def test_a_sound_completion_has_no_flags() -> None:
    """Rounding just above zero is no defect."""
    assert trace_of(logprobs=logprobs(-1, 1e-6)).certificate["flags"] == []


@pytest.mark.parametrize("values", [None, logprobs(-1), logprobs(-1, np.nan)], ids=["none", "short", "nan"])
def test_unusable_logprobs_are_none(values: Any) -> None:
    """A trace of which any sampled token lacks a log-probability has none."""
    assert trace_of(logprobs=values).logprobs is None


@pytest.mark.parametrize(
    ("verified", "fidelity"),
    [((True, True), "exact"), ((True, None), "unverified"), ((False, None), "drifted"), ((True, False), "drifted")],
)
def test_fidelity_is_the_worst_that_is_known(verified: tuple[bool | None, bool | None], fidelity: str) -> None:
    """One prompt that the engine saw differently makes the trace drifted; one that is not known, unverified."""
    first = root("a", ids(1), ids(2), prompt_verified=verified[0])
    trace = assemble([first, child(first, "b", ids(3), ids(4), prompt_verified=verified[1])], [True, True], [])
    assert fidelity == trace.fidelity


def test_drift_names_its_turn() -> None:
    """The first prompt that the engine saw differently is named, with the position where the proxy noted it."""
    first = root("a", ids(1), ids(2))
    second = child(first, "b", ids(3), ids(4), prompt_verified=False, metadata={"first_difference": 2})
    found = assemble([first, second], [True, True], []).certificate["first_difference"]
    assert found == {"kind": "engine_prompt", "completion": "b", "turn": 1, "position": 2}


def test_without_prompt_ids_nothing_is_exact() -> None:
    """A prompt that is not known cannot have been verified, whatever was recorded."""
    assert trace_of(prompt_ids=ids(), prompt_verified=True).fidelity == "unverified"


def test_only_trained_tokens_bear_on_the_logprob_flags() -> None:
    """A defect of tokens that are context here is the other trace's."""
    first = root("a", ids(1), ids(2), logprobs=None)
    trace = assemble([first, child(first, "b", ids(3), ids(4))], [False, True], [])
    assert trace.certificate["flags"] == ["shared_prefix"]
    assert trace.logprobs is not None
