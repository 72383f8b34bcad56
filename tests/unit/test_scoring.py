"""Comparing traces with an engine: which tokens, and each of them once. The engine itself is in tests/e2e."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from polar.scoring import Comparison, compare, lines, neutral


class Counting:
    """An engine that gives each token minus its place as its log-probability, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def score(self, ids: list[int]) -> list[float | None]:
        self.asked.append(ids)
        return [None, *(-float(place) for place in range(1, len(ids)))]


def trace(**changes: Any) -> dict[str, Any]:
    """Two prompt tokens, a sampled one, one of the harness's, two sampled ones."""
    line = {"start": 0, "end": 1, "sampled_with": {"temperature": 1.0}}
    values: dict[str, Any] = {
        "prompt_ids": [5, 6],
        "response_ids": [7, 8, 9, 10],
        "loss_mask": [1, 0, 1, 1],
        "response_logprobs": [-2.0, 0.0, -4.0, -5.5],
        "metadata": {
            "completion_metadata": [line, {**line, "start": 2, "end": 4}],
            "certificate": {"policy_versions": [{"version": "1", "start": 0, "end": 1}]},
        },
    }
    return {**values, **changes}


def compared(shown: dict[str, Any], version: str | None = None) -> Comparison:
    return asyncio.run(compare(Counting(), shown, version))  # type: ignore[arg-type]


def test_each_trained_token_is_compared_in_one_pass() -> None:
    """The whole stream is scored at once; context tokens do not count."""
    engine = Counting()
    found = asyncio.run(compare(engine, trace()))  # type: ignore[arg-type]
    assert engine.asked == [[5, 6, 7, 8, 9, 10]]
    assert (found.trained, found.compared, found.maximum, found.worst) == (3, 3, 0.5, 3)
    assert found.mean == pytest.approx(0.5 / 3)


def test_other_weights_are_left_out() -> None:
    """Tokens of a version that the engine no longer has are counted as such."""
    found = compared(trace(), "2")
    assert (found.compared, found.skipped) == (2, {"other weights": 1})
    assert compared(trace(), "1").compared == 3


def test_without_logprobs_nothing_is_compared() -> None:
    """A trace that has none says so, and has no mean."""
    found = compared(trace(response_logprobs=None))
    assert (found.compared, found.mean, found.skipped) == (0, None, {"no log-probability": 3})


def test_a_tokens_own_call_decides() -> None:
    """One call at another temperature takes only its own tokens out."""
    shown = trace()
    shown["metadata"]["completion_metadata"][1]["sampled_with"] = {"temperature": 0.5}
    found = compared(shown)
    assert (found.compared, found.skipped) == (1, {"other sampling": 2})


@pytest.mark.parametrize(
    ("sampled_with", "same"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_p": 1.0, "max_tokens": 5, "stop": ["x"]}, True),
        ({"temperature": 0.0}, True),
        ({"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}, True),
        ({"temperature": 0.7}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 20}, False),
        ({"presence_penalty": 0.5}, False),
    ],
)
def test_what_can_be_compared(sampled_with: dict[str, Any], same: bool) -> None:
    """Only settings that leave the model's distribution as it is."""
    assert neutral(sampled_with) is same


def test_a_tree_is_scored_path_by_path_and_no_token_twice() -> None:
    """Each leaf's path is one pass; what an earlier path has shown is context in a later one."""
    node = {"position": 0, "completion_id": None}
    table = [
        {"parent": -1, "start": 0, "end": 2, "sampled": False, **node},
        {"parent": 0, "start": 2, "end": 3, "sampled": True, **node},
        {"parent": 1, "start": 3, "end": 5, "sampled": True, **node},
        {"parent": 1, "start": 5, "end": 6, "sampled": True, **node},
    ]
    shown = trace(loss_mask=[1, 1, 1, 1])
    shown["metadata"]["tree"] = table
    found = list(lines(shown, np.array([True, True, True, True])))
    assert [line.ids for line in found] == [[5, 6, 7, 8, 9], [5, 6, 7, 10]]
    assert [line.responses.tolist() for line in found] == [[0, 1, 2], [3]]
    assert [line.places.tolist() for line in found] == [[2, 3, 4], [3]]
