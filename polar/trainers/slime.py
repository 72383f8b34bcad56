"""Slime: a rollout function whose prompt groups are Polar's tasks. The configuration keys are those of the original.

    --rollout-function-path polar.trainers.slime.generate_rollout_polar_async
    --custom-reward-post-process-path polar.trainers.slime.post_process_rewards
    --custom-config-path polar.yaml

There is no thread and no listener here: tasks that were submitted run at Polar while Slime trains, and the feed keeps
their results until the next call. A call tops the window up, takes results, and returns when it has a batch.

From public source of THUDM/slime (`slime/utils/types.py`: `Sample`; `slime/rollout/base_types.py`:
`RolloutFnTrainOutput`): the function is called with (args, rollout_id, data_buffer, evaluation), `data_buffer.
get_samples(n)` gives groups of samples, and what comes back is a list of groups. Slime is not on PyPI (the package of
that name is another), so nothing here was run against it; shapes are tested.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.client import Client, SessionResult
from polar.client.feed import Reader
from polar.trainers.advantages import advantages
from polar.trainers.groups import Group
from polar.trainers.runner import instruction
from polar.trainers.samples import Sample, samples_of
from polar.trainers.slime_config import SlimeConfig
from polar.trainers.template import fill, load

logger = logging.getLogger(__name__)
STATUS = {"TIMEOUT": "aborted", "ERROR": "failed"}
WAIT_SECONDS = 5.0
_running: dict[str, Rollouts] = {}


@dataclass(slots=True)
class Owned:
    """A prompt group that Polar has."""

    group: Group
    prompts: list[Any]
    """Slime's samples of the prompt, one for each session."""
    submitted_at: int
    """The rollout during which it was submitted: the policy's version then."""


@dataclass(slots=True)
class Counts:
    """Why groups did not come to train, and what came."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        self.values[f"polar/{name}"] = self.values.get(f"polar/{name}", 0) + amount


def generate_rollout_polar_async(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """What Slime calls for each rollout."""
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
    from slime.utils.types import Sample as SlimeSample

    config = SlimeConfig.of(args)
    rollouts = _running.get(config.url) or _running.setdefault(config.url, Rollouts(args, config, SlimeSample))
    if evaluation:
        data, metrics = rollouts.evaluate(rollout_id)
        return RolloutFnEvalOutput(data=data, metrics=metrics)
    groups, metrics = rollouts.step(rollout_id, data_buffer)
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards, and what Slime takes for advantages: relative to the group's other sessions, as `step` found them.

    With `polar_scoring_mode: individual` the rewards are left to Slime."""
    config = SlimeConfig.of(args)
    raw = [float(sample.metadata.get("polar_reward") or 0.0) for sample in samples]
    if config.scoring_mode == "individual":
        return raw, raw
    return raw, [float(sample.metadata.get("polar_advantage") or 0.0) for sample in samples]


class Rollouts:
    """The window of prompt groups that Polar has, from one call to the next."""

    def __init__(self, args: Any, config: SlimeConfig, sample_class: Any, client: Client | None = None) -> None:
        self.args, self.config, self.sample_class = args, config, sample_class
        self.template = load(config.task_template)
        self.client = client or Client(config.url, config.api_key)
        self.owned: dict[str, Owned] = {}
        self.ready: list[Owned] = []
        self.reader: Reader | None = None
        self.next_index = 0

    def step(self, rollout_id: int, data_buffer: Any) -> tuple[list[list[Any]], dict[str, float]]:
        """A batch of groups as lists of Slime's samples, and metrics."""
        counts = Counts()
        batch: list[list[Any]] = []
        wanted = self.args.rollout_batch_size
        while len(batch) < wanted:
            self._top_up(rollout_id, data_buffer, wanted * self.config.max_async_level - len(batch))
            while self.ready and len(batch) < wanted:
                made = self._accepted(self.ready.pop(0), rollout_id, counts)
                if made is not None:
                    batch.append(made)
            if len(batch) < wanted and not self.ready:
                self._take_page()
        counts.add("groups_in_flight", len(self.owned))
        counts.add("groups_waiting", len(self.ready))
        return batch, counts.values

    def evaluate(self, rollout_id: int) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """The tasks of `polar_eval_tasks`, each a line {"prompt", "metadata"}, run once each."""
        name = self.config.eval_dataset_name
        if self.config.eval_tasks is None:
            raise ValueError("evaluation needs polar_eval_tasks: a file with a prompt and its metadata on each line")
        with open(self.config.eval_tasks, "rb") as file:  # noqa: PTH123 - a path of Slime's, as text
            rows = [self.sample_class(**orjson.loads(line)) for line in file if line.strip()]
        tasks = []
        for number, row in enumerate(rows):
            row.group_index = number
            task = self._task([row], rollout_id, 1)
            tasks.append({**task, "task_id": f"{task['task_id']}-eval"})
        results = list(self.client.run(tasks))
        rewards = [0.0 if result.reward is None else result.reward for result in results]
        untrainable = sum(result.reward is None for result in results)
        truncated = [any(trace.finish_reason == "length" for trace in result.traces) for result in results]
        samples = [made for result in results for made in self._slime_samples(result, rows[0], samples_of(result))]
        data = {name: {"rewards": rewards, "truncated": truncated, "samples": samples}}
        return data, {"polar/eval_without_reward": untrainable}

    def _top_up(self, rollout_id: int, data_buffer: Any, window: int) -> None:
        """Submit prompt groups until Polar owns as many as it may."""
        if self.reader is None:
            self.reader = Reader(self.client.feed_end(), wait=WAIT_SECONDS)
        room = window - len(self.owned) - len(self.ready)
        prompts = data_buffer.get_samples(room) if room > 0 else []
        tasks = [self._task(group, rollout_id, len(group)) for group in prompts]
        for group, task in zip(prompts, tasks, strict=True):
            name = task["task_id"]
            self.owned[name] = Owned(Group(name, len(group)), group, rollout_id)
        for _ in self.client.submit_many(tasks, concurrency=self.config.submit_concurrency):
            pass

    def _task(self, group: list[Any], rollout_id: int, sessions: int) -> dict[str, Any]:
        """The template, filled with the group's first sample."""
        values = {
            "sample": group[0],
            "args": self.args,
            "rollout_id": rollout_id,
            "sglang": self.config.sglang(self.args),
        }
        values["prompt"] = instruction(group[0].prompt)
        task: dict[str, Any] = fill(self.template, values)
        if self.config.instruction_template is not None:
            task["instruction"] = str(fill(self.config.instruction_template, values))
        task.setdefault("instruction", values["prompt"])
        metadata = dict(task.get("metadata") or {})
        metadata |= {"policy_version": rollout_id, "rollout_step": rollout_id, "group_id": str(group[0].group_index)}
        given = {"timeout_seconds": self.config.request_timeout} if self.config.request_timeout else {}
        name = str(fill(self.config.task_id_template, values))
        return {**given, **task, "task_id": name, "num_samples": sessions, "metadata": metadata}

    def _take_page(self) -> None:
        assert self.reader is not None
        for result in self.client.page(self.reader):
            owned = self.owned.get(result.task_id)
            if owned is None:
                continue
            owned.group.add(result, samples_of(result))
            if owned.group.complete:
                self.ready.append(self.owned.pop(result.task_id))

    def _accepted(self, owned: Owned, rollout_id: int, counts: Counts) -> list[Any] | None:
        """The group as Slime's samples, or None with the reason counted."""
        group = owned.group
        behind = rollout_id - owned.submitted_at
        samples = group.samples()
        reason = None
        if behind > self.config.max_off_policy_steps(self.args):
            reason = "dropped_stale"
        elif not any(sample.sampled_tokens for sample in samples):
            failed = all(result.status == "ERROR" for result in group.results.values())
            reason = "dropped_task_failure" if failed else "dropped_zero_trainable_tokens"
        elif group.accepted_fraction < self.config.min_complete_accept_fraction:
            reason = "dropped_low_complete_fraction"
        if reason is not None:
            counts.add(reason)
            return None
        advantages([sample for sample in samples if sample.reward is not None])
        counts.add("groups")
        counts.add("staleness", behind)
        made: list[Any] = []
        for prompt, (session_id, usable) in zip(owned.prompts, group.sessions.items(), strict=False):
            made += self._slime_samples(group.results[session_id], prompt, usable)
        return made

    def _slime_samples(self, result: SessionResult, prompt: Any, samples: Iterable[Sample]) -> list[Any]:
        """One for each trace, siblings under one `rollout_id`; a masked one for a session that has none."""
        self.next_index += 1
        made = [slime_sample(self.sample_class, sample, prompt, self.next_index) for sample in samples]
        return made or [masked_sample(self.sample_class, result, prompt, self.next_index)]


def slime_sample(sample_class: Any, sample: Sample, prompt: Any, session: int) -> Any:
    """One of Slime's samples; `rollout_id` is shared by a session's traces, so that its loss counts it once."""
    status = STATUS.get(sample.status, "truncated" if sample.finish_reason == "length" else "completed")
    made = _new(sample_class, prompt, status, session)
    made.tokens = sample.ids.tolist()
    made.response_length = len(sample.response_ids)
    made.loss_mask = sample.loss_mask.tolist()
    made.rollout_log_probs = None if sample.logprobs is None else sample.logprobs.tolist()
    made.reward = sample.reward
    made.weight_versions = [str(span.version) for span in sample.versions]
    made.metadata |= {
        "polar_session": sample.session_id,
        "polar_trace": sample.trace,
        "polar_weight": sample.weight,
        "polar_reward": sample.reward,
        "polar_advantage": sample.advantage,
        "polar_fidelity": sample.fidelity,
    }
    return made


def masked_sample(sample_class: Any, result: SessionResult, prompt: Any, session: int) -> Any:
    """A place for a session that cannot train: two tokens, none of them trained, removed from the loss."""
    made = _new(sample_class, prompt, STATUS.get(result.status, "failed"), session)
    made.tokens, made.response_length, made.loss_mask, made.rollout_log_probs = [0, 0], 1, [0], [0.0]
    made.reward, made.remove_sample = 0.0, True
    made.metadata |= {"polar_session": result.session_id, "polar_reward": None, "polar_advantage": 0.0}
    return made


def _new(sample_class: Any, prompt: Any, status: str, session: int) -> Any:
    made = sample_class(group_index=prompt.group_index, index=prompt.index, prompt=prompt.prompt, label=prompt.label)
    made.status = sample_class.Status(status)
    made.metadata = dict(prompt.metadata or {})
    made.rollout_id = session
    return made
