"""Samples as arrays that a model takes: padded on both sides of the first sampled token, or packed end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar.trainers.samples import Sample, SampleError

Array = NDArray[Any]


def padded(
    samples: Sequence[Sample],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, Array]:
    """One row a sample: prompts padded on the left, responses on the right. B samples, P and R the longest or given.

    prompts [B,P], responses, response_mask, logprobs, advantages [B,R], input_ids, attention_mask, position_ids
    [B,P+R], rewards, weights [B]. Raises SampleError for a sample that is longer than it may be."""
    width = _width([len(each.prompt_ids) for each in samples], prompt_length, "prompt", samples)
    length = _width([len(each.response_ids) for each in samples], response_length, "response", samples)
    rows = len(samples)
    ids = np.full((rows, width + length), pad_id, np.int64)
    attention = np.zeros((rows, width + length), np.int64)
    mask = np.zeros((rows, length), np.int64)
    logprobs = np.zeros((rows, length), np.float32)
    for row, sample in enumerate(samples):
        start, end = width - len(sample.prompt_ids), width + len(sample.response_ids)
        ids[row, start:width], ids[row, width:end] = sample.prompt_ids, sample.response_ids
        attention[row, start:end] = 1
        mask[row, : end - width] = sample.loss_mask
        if sample.logprobs is not None:
            logprobs[row, : end - width] = sample.logprobs
    advantage = np.array([0.0 if each.advantage is None else each.advantage for each in samples], np.float32)
    return {
        "prompts": ids[:, :width],
        "responses": ids[:, width:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "response_mask": mask,
        "logprobs": logprobs,
        "advantages": advantage[:, None] * mask.astype(np.float32),
        "rewards": np.array([np.nan if each.reward is None else each.reward for each in samples], np.float32),
        "weights": np.array([each.weight for each in samples], np.float32),
    }


def packed(samples: Sequence[Sample]) -> dict[str, Array]:
    """All samples end to end, N tokens in all: no padding. `starts` [B+1] has where each begins, and N.

    input_ids, loss_mask, logprobs, advantages, position_ids, sample [N]; prompts carry the mask 0."""
    lengths = np.array([len(each) for each in samples], np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    total = int(starts[-1])
    arrays: dict[str, Array] = {
        "input_ids": np.zeros(total, np.int64),
        "loss_mask": np.zeros(total, np.int64),
        "logprobs": np.zeros(total, np.float32),
        "advantages": np.zeros(total, np.float32),
    }
    for sample, start, end in zip(samples, starts, starts[1:], strict=False):
        answer = start + len(sample.prompt_ids)
        arrays["input_ids"][start:answer], arrays["input_ids"][answer:end] = sample.prompt_ids, sample.response_ids
        arrays["loss_mask"][answer:end] = sample.loss_mask
        if sample.logprobs is not None:
            arrays["logprobs"][answer:end] = sample.logprobs
        arrays["advantages"][answer:end] = sample.loss_mask * np.float32(sample.advantage or 0.0)
    number = np.repeat(np.arange(len(samples)), lengths)
    return {**arrays, "sample": number, "position_ids": np.arange(total) - starts[:-1][number], "starts": starts}


def _width(lengths: list[int], limit: int | None, part: str, samples: Sequence[Sample]) -> int:
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        sample = samples[lengths.index(longest)]
        said = f"session {sample.session_id}, trace {sample.trace}: its {part} has {longest} tokens"
        raise SampleError(f"{said}, more than {limit}; leave it out, or allow more")
    return longest if limit is None else limit
