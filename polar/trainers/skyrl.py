"""SkyRL: a generator whose trajectories are Polar's sessions.

    generator = PolarGenerator(url, key, "task.yaml", step_wise=config.generator.step_wise_trajectories)

Facts of skyrl 0.4.0, `skyrl/train/generators/base.py` (skyrl-train 0.3.1 has the same in `skyrl_train/generators`):
`GeneratorInterface.generate(input_batch)` is awaited with `prompts`, `env_extras`, `trajectory_ids`, and answers with
lists `prompt_token_ids`, `response_ids`, `rewards`, `loss_masks`, `stop_reasons`, `rollout_logprobs`, `trajectory_ids`
and `is_last_step`, in the order of the prompts. Step-wise, a trajectory may have several rows, one after the other.
The class needs no base: SkyRL calls `generate` alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from polar.client import SessionResult
from polar.trainers.runner import Runner, main_sample, placeholder
from polar.trainers.samples import Sample, samples_of

STOPS = {"stop": "stop", "tool_calls": "stop", "length": "length"}


class PolarGenerator:
    """Callable as SkyRL calls a generator; the arguments are those of `Runner`.

    The template knows `{prompt}` and `{extras.<name>}`, the row's environment extras. `step_wise` hands out every
    trace of a session; otherwise each has one row, the trace with the most sampled tokens."""

    def __init__(self, url: str, key: str | None, template: Any, *, step_wise: bool = False, pad_id: int = 0) -> None:
        self.runner = Runner(url, key, template, prefix="polar-skyrl")
        self.step_wise, self.pad_id = step_wise, pad_id

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """One session for each prompt."""
        prompts = input_batch["prompts"]
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        tasks = [self.runner.task(prompt, extras=extra) for prompt, extra in zip(prompts, extras, strict=True)]
        found = await asyncio.to_thread(self.runner.run, tasks)
        return generator_output(
            [some[0] for some in found], input_batch.get("trajectory_ids"), self.step_wise, self.pad_id
        )


def generator_output(
    results: Sequence[SessionResult], trajectory_ids: Sequence[Any] | None, step_wise: bool = False, pad_id: int = 0
) -> dict[str, Any]:
    """Sessions as SkyRL's output. A session that cannot train has a masked row with reward 0.0, and is counted.

    SkyRL's rewards are numbers: leave sessions that failed out of its baseline with its own filter on the mask."""
    rows: list[tuple[Sample, int, bool]] = []
    failed = 0
    for number, result in enumerate(results):
        samples = samples_of(result) if step_wise else [each for each in [main_sample(result)] if each]
        failed += not samples
        samples = samples or [placeholder(result, pad_id)]
        rows += [(sample, number, sample is samples[-1]) for sample in samples]
    return {
        "prompt_token_ids": [sample.prompt_ids.tolist() for sample, _, _ in rows],
        "response_ids": [sample.response_ids.tolist() for sample, _, _ in rows],
        "rewards": [0.0 if sample.reward is None else sample.reward for sample, _, _ in rows],
        "loss_masks": [sample.loss_mask.tolist() for sample, _, _ in rows],
        "stop_reasons": [STOPS.get(sample.finish_reason or "", "stop") for sample, _, _ in rows],
        "rollout_metrics": {"polar/sessions": len(results), "polar/untrainable_sessions": failed},
        "rollout_logprobs": [[] if sample.logprobs is None else sample.logprobs.tolist() for sample, _, _ in rows],
        "trajectory_ids": None if trajectory_ids is None else [trajectory_ids[number] for _, number, _ in rows],
        "is_last_step": [last for _, _, last in rows] if step_wise else None,
    }
