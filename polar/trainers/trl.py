"""TRL: a rollout function for `GRPOTrainer`, and the reward function that goes with it.

    rollouts = PolarRollouts(url, key, "task.yaml")
    GRPOTrainer(model, reward_funcs=polar_reward, rollout_func=rollouts, train_dataset=prompts, args=config)

Facts of trl 1.16.0, `trl/trainer/grpo_trainer.py`: `rollout_func(prompts, trainer)` returns `prompt_ids`,
`completion_ids` and `logprobs`, one row for each entry of `prompts` (which has a prompt as often as it is sampled);
`env_mask` is 1 where the model wrote; every other key goes to the reward functions. A row for which every reward
function returns None is left out of its group's baseline, so a session that failed stays out of it, too.
The trainer's engine must be the one that Polar's lane talks to, with the trainer's weights: see docs/policy.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from polar.trainers.runner import Runner, flat, main_sample, placeholder
from polar.trainers.samples import Sample


class PolarRollouts:
    """Callable as TRL calls a `rollout_func`; the arguments are those of `Runner`."""

    def __init__(self, url: str, key: str | None, template: Any, *, concurrency: int = 8) -> None:
        self.runner = Runner(url, key, template, prefix="polar-trl", concurrency=concurrency)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """One task for each prompt, with as many sessions as it stands there one after the other."""
        repeated = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        results = flat(self.runner.run([self.runner.task(prompt, count) for prompt, count in repeated]))
        pad = getattr(getattr(trainer, "processing_class", None), "pad_token_id", None) or 0
        return rollout_output([main_sample(result) or placeholder(result, pad) for result in results])


def rollout_output(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Samples as the dict that TRL wants."""
    return {
        "prompt_ids": [sample.prompt_ids.tolist() for sample in samples],
        "completion_ids": [sample.response_ids.tolist() for sample in samples],
        "logprobs": [_logprobs(sample) for sample in samples],
        "env_mask": [sample.loss_mask.tolist() for sample in samples],
        "polar_reward": [sample.reward for sample in samples],
        "polar_session": [sample.session_id for sample in samples],
    }


def polar_reward(completions: Sequence[Any], polar_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The evaluator's reward; None where there is none."""
    return list(polar_reward)


def _logprobs(sample: Sample) -> list[float]:
    return [0.0] * len(sample.response_ids) if sample.logprobs is None else sample.logprobs.tolist()
