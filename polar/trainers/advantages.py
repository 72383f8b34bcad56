"""Advantages of samples within their groups. A session counts once, whatever its number of traces.

A session's reward is the mean over its samples; baselines are means over sessions. So an agent that compacts its
context into ten traces neither outvotes its nine siblings nor moves their baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polar.trainers.samples import Floats, Sample, SampleError

Baseline = Literal["leave_one_out", "group_norm", "group_mean"]


def advantages(samples: Sequence[Sample], baseline: Baseline = "leave_one_out", *, epsilon: float = 1e-6) -> Floats:
    """[N] each sample's advantage, also set on the sample. Raises SampleError for one without a reward.

    leave_one_out   reward less the mean of the group's other sessions
    group_norm      reward less the group's mean, over the standard deviation of its sessions plus epsilon (GRPO)
    group_mean      reward less the group's mean

    A group of one session has nothing to compare with: its advantage is 0."""
    rewards = _rewards(samples)
    session, first = _numbered([sample.session_id for sample in samples])
    group_of_sample, _ = _numbered([sample.group_id for sample in samples])
    group = group_of_sample[first]
    per_session = _mean(rewards, session, len(first))
    count = np.bincount(group)
    total = np.bincount(group, per_session)
    if baseline == "leave_one_out":
        others = (total[group] - per_session) / np.maximum(count[group] - 1, 1)
        found = rewards - others[session]
    else:
        found = rewards - (total / count)[group][session]
        if baseline == "group_norm":
            spread = np.sqrt(_mean((per_session - (total / count)[group]) ** 2, group, len(count)))
            found = found / (spread[group][session] + epsilon)
    found[count[group][session] < 2] = 0.0
    answer = found.astype(np.float32)
    for sample, advantage in zip(samples, answer.tolist(), strict=True):
        sample.advantage = advantage
    return answer


def token_weights(samples: Sequence[Sample], by: Literal["session", "token"] = "session") -> list[Floats]:
    """[R] of each sample: what each token counts in the loss; over all samples the weights sum to 1.

    session   each session the same, its traces by their weight, their tokens alike
    token     each trained token the same"""
    masks = [sample.loss_mask.astype(np.float32) for sample in samples]
    if by == "token":
        total = sum(float(mask.sum()) for mask in masks)
        return [mask / max(total, 1.0) for mask in masks]
    shares = np.array([sample.weight for sample in samples], np.float64)
    shares /= max(float(shares.sum()), 1e-12)
    return [mask * np.float32(share / max(float(mask.sum()), 1.0)) for mask, share in zip(masks, shares, strict=True)]


def _rewards(samples: Sequence[Sample]) -> NDArray[np.float64]:
    for sample in samples:
        if sample.reward is None:
            said = f"session {sample.session_id}, trace {sample.trace}: has no reward"
            raise SampleError(f"{said}; give the task an evaluator, or set the reward yourself")
    return np.array([sample.reward for sample in samples], np.float64)


def _numbered(names: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """A number for each name, and where each number comes first."""
    numbers: dict[str, int] = {}
    found = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.intp)
    first = np.zeros(len(numbers), np.intp)
    first[found[::-1]] = np.arange(len(names))[::-1]
    return found, first


def _mean(values: NDArray[np.float64], of: NDArray[np.intp], count: int) -> NDArray[np.float64]:
    return np.bincount(of, values, count) / np.maximum(np.bincount(of, minlength=count), 1)
