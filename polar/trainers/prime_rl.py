"""prime-rl and verifiers: samples as training samples of the one and as message nodes of the other.

Facts of verifiers 0.4.0, `verifiers/v1/graph.py`: a `MessageNode` adds `token_ids` to the path above it, with `mask`
beside them and `logprobs` for the masked tokens alone; `advantages` are laid out like `logprobs`. prime-rl is not on
PyPI; its `TrainingSample` (`src/prime_rl/transport/types.py`) is written from public source: `token_ids`, `mask`,
`logprobs`, `temperatures` and `advantages`, all as long as the stream, and `env_name`. Older versions part the stream
(`prompt_ids`, `prompt_mask`, `completion_ids`, `completion_mask`, `completion_logprobs`, one `advantage`): ask for
those with `parted=True`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polar.trainers.samples import Sample, SampleError


def training_sample(
    sample: Sample, env_name: str = "polar", *, temperature: float = 1.0, parted: bool = False
) -> dict[str, Any]:
    """The fields of prime-rl's `TrainingSample`, to be given to that class by name."""
    logprobs, advantage = _trained(sample)
    if parted:
        return {
            "prompt_ids": sample.prompt_ids.tolist(),
            "prompt_mask": [False] * len(sample.prompt_ids),
            "completion_ids": sample.response_ids.tolist(),
            "completion_mask": sample.loss_mask.astype(bool).tolist(),
            "completion_logprobs": logprobs.tolist(),
            "advantage": advantage,
        }
    before = [0.0] * len(sample.prompt_ids)
    return {
        "token_ids": sample.ids.tolist(),
        "mask": [False] * len(before) + sample.loss_mask.astype(bool).tolist(),
        "logprobs": before + logprobs.tolist(),
        "temperatures": [temperature] * len(sample),
        "env_name": env_name,
        "advantages": before + (sample.loss_mask * np.float32(advantage)).tolist(),
    }


def message_nodes(sample: Sample) -> list[dict[str, Any]]:
    """The fields of verifiers' `MessageNode`s, a path from its root: what was read, what was sampled, in turn.

    Texts are left empty: training reads the tokens."""
    logprobs, advantage = _trained(sample)
    nodes: list[dict[str, Any]] = [_node(None, "user", sample.prompt_ids.tolist())]
    for sampled, start, end in sample.segments():
        node = _node(len(nodes) - 1, "assistant" if sampled else "user", sample.response_ids[start:end].tolist())
        if sampled:
            node |= {
                "sampled": True,
                "mask": [True] * (end - start),
                "logprobs": logprobs[start:end].tolist(),
                "advantages": [advantage] * (end - start),
            }
        nodes.append(node)
    return nodes


def _node(parent: int | None, role: str, ids: list[int]) -> dict[str, Any]:
    return {
        "parent": parent,
        "message": {"role": role, "content": ""},
        "token_ids": ids,
        "mask": [False] * len(ids),
    }


def _trained(sample: Sample) -> tuple[Any, float]:
    if sample.logprobs is None or sample.advantage is None:
        raise SampleError(f"session {sample.session_id}, trace {sample.trace}: has no advantage; compute them first")
    return sample.logprobs, sample.advantage
