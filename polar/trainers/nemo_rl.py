"""NeMo-RL: samples as message logs, and as the rows that its NeMo Gym rollouts are made of.

From documentation and public source of NVIDIA-NeMo/RL (`nemo_rl/data/interfaces.py`: `DatumSpec`, `LLMMessageLogType`;
`nemo_rl/experience/rollouts.py`): a `message_log` is a list of {role, content, token_ids}, whose token ids laid end to
end are the sequence; an assistant's entry has `generation_logprobs`, one for each of its tokens, and is what trains. A
Gym result has `input_message_log`, `message_log` and `full_result.reward`. Its package on PyPI is an empty placeholder,
so nothing here was run against it. Tensors are made by `tensor`, torch's unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polar.trainers.samples import Sample

Tensor = Callable[[Any], Any]


def torch_tensor(array: Any) -> Any:
    """A torch tensor of an array."""
    import torch

    return torch.as_tensor(np.ascontiguousarray(array))


def message_log(sample: Sample, tensor: Tensor = torch_tensor) -> list[dict[str, Any]]:
    """The stream in turns: what the policy read as `user`, what it sampled as `assistant`. Texts are left empty."""
    log = [{"role": "user", "content": "", "token_ids": tensor(sample.prompt_ids.astype(np.int64))}]
    for sampled, start, end in sample.segments():
        ids = tensor(sample.response_ids[start:end].astype(np.int64))
        turn: dict[str, Any] = {"role": "assistant" if sampled else "user", "content": "", "token_ids": ids}
        if sampled and sample.logprobs is not None:
            turn["generation_logprobs"] = tensor(sample.logprobs[start:end])
        if not sampled and log[-1]["role"] == "user":
            # The policy is read to in one entry: NeMo-RL's logs alternate.
            turn["token_ids"] = tensor(np.concatenate([np.asarray(log.pop()["token_ids"]), np.asarray(ids)]))
        log.append(turn)
    return log


def datum_spec(sample: Sample, index: int, task_name: str = "polar", tensor: Tensor = torch_tensor) -> dict[str, Any]:
    """A `DatumSpec`. `loss_multiplier` is the session's share, so that it counts once whatever its traces."""
    return {
        "message_log": message_log(sample, tensor),
        "length": len(sample),
        "extra_env_info": {"session_id": sample.session_id, "group_id": sample.group_id, "reward": sample.reward},
        "loss_multiplier": sample.weight,
        "idx": index,
        "task_name": task_name,
    }


def gym_results(samples: Sequence[Sample], tensor: Tensor = torch_tensor) -> list[dict[str, Any]]:
    """Rows as NeMo-RL reads them from Gym."""
    found = []
    for sample in samples:
        log = message_log(sample, tensor)
        full = {"reward": sample.reward, "polar_session": sample.session_id, "mask_sample": not sample.trainable}
        found.append({"input_message_log": log[:1], "message_log": log, "full_result": full})
    return found
