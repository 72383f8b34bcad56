"""Tinker: samples as `Datum`s for `forward_backward` with the losses importance_sampling, ppo and cispo.

Facts of tinker 0.38.0, `tinker/types/datum.py` and `model_input.py`, and of tinker-cookbook 0.6.1,
`rl/data_processing.py`: a datum's `model_input` is the stream without its last token; `loss_fn_inputs` holds
`target_tokens`, `logprobs`, `advantages` and `mask`, each one shorter than the stream and shifted by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polar.trainers.advantages import token_weights
from polar.trainers.samples import Floats, Sample, SampleError


def datums(samples: Sequence[Sample], *, weigh: bool = False, with_mask: bool = True) -> list[Any]:
    """One `tinker.Datum` a sample. Advantages must have been computed (`polar.trainers.advantages`).

    Tinker's losses sum over tokens. `weigh` multiplies each advantage by the token's weight, so that every session
    counts the same; without it, every token does. Its server takes no `mask`, and a token whose advantage is 0 trains
    nothing: give `with_mask=False` to what goes straight to `forward_backward`."""
    import tinker

    weights: Iterable[Floats | None] = token_weights(samples) if weigh else [None] * len(samples)
    made = []
    for sample, weight in zip(samples, weights, strict=True):
        arrays = loss_inputs(sample, weight)
        if not with_mask:
            del arrays["mask"]
        made.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(arrays.pop("input")), loss_fn_inputs=arrays))
    return made


def loss_inputs(sample: Sample, weight: Floats | None = None) -> dict[str, Any]:
    """The arrays of one datum, shifted; `input` is its model input."""
    if sample.advantage is None or sample.logprobs is None:
        raise SampleError(f"session {sample.session_id}, trace {sample.trace}: has no advantage; compute them first")
    ids = sample.ids
    behind = np.zeros(len(sample.prompt_ids), np.float32)
    mask = np.concatenate([behind, sample.loss_mask.astype(np.float32)])
    scale = mask if weight is None else np.concatenate([behind, weight])
    return {
        "input": ids[:-1].tolist(),
        "target_tokens": ids[1:].astype(np.int64),
        "logprobs": np.concatenate([behind, sample.logprobs])[1:],
        "advantages": (scale * np.float32(sample.advantage))[1:],
        "mask": mask[1:],
    }
