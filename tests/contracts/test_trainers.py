"""Every bridge over the same sessions: no sampled token is lost, moved or trained without its log-probability.

Shapes alone, without the trainers' packages; `make test-trainers` holds the same output to the packages' own types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polar.client import SessionResult
from polar.trainers import Sample, advantages, samples_of
from polar.trainers.nemo_gym import verify_response
from polar.trainers.nemo_rl import datum_spec, gym_results, message_log
from polar.trainers.prime_rl import message_nodes, training_sample
from polar.trainers.runner import Runner, instruction, main_sample, placeholder
from polar.trainers.samples import SampleError
from polar.trainers.skyrl import generator_output
from polar.trainers.slime import Rollouts, post_process_rewards
from polar.trainers.slime_config import SlimeConfig
from polar.trainers.template import fill, load
from polar.trainers.tinker import loss_inputs
from polar.trainers.trl import polar_reward, rollout_output
from polar.trainers.verl import output_fields
from tests.fakes.results import result, trace

Trained = list[tuple[int, float]]


def results() -> list[SessionResult]:
    """Three sessions: one of a long and a short trace, one of a single trace, one that failed."""
    long = trace(4, ((3, 2), (2, 1), (1, 0)), reward=1.0, seed=1)
    short = trace(2, ((2, 0),), reward=1.0, seed=2)
    bodies = [
        result("ses-a", traces=[short, long]),
        result("ses-b", traces=[trace(3, ((2, 2), (2, 0)), reward=0.0, seed=3, finish_reason="length")]),
        result("ses-c", traces=[], status="ERROR"),
    ]
    return [SessionResult.read(body) for body in bodies]


def usable() -> list[Sample]:
    """Their samples, with advantages."""
    samples = [sample for each in results() for sample in samples_of(each)]
    advantages(samples)
    return samples


def trained(sample: Sample) -> Trained:
    """What of a sample trains: place in the whole stream and log-probability."""
    assert sample.logprobs is not None
    places = np.flatnonzero(sample.loss_mask)
    return [(int(place) + len(sample.prompt_ids), float(sample.logprobs[place])) for place in places]


def of_arrays(mask: Any, logprobs: Any, offset: int) -> Trained:
    """The same of arrays beside a response, or beside the stream."""
    return [(place + offset, float(logprobs[place])) for place, bit in enumerate(mask) if bit]


def test_trl_rows_line_up() -> None:
    """A row for each session, of its longest trace; one that failed trains nothing and has no reward."""
    rows = [main_sample(each) or placeholder(each) for each in results()]
    found = rollout_output(rows)
    assert {len(values) for values in found.values()} == {3}
    for number, sample in enumerate(rows[:2]):
        assert found["prompt_ids"][number] + found["completion_ids"][number] == sample.ids.tolist()
        assert of_arrays(found["env_mask"][number], found["logprobs"][number], len(sample.prompt_ids)) == trained(
            sample
        )
    assert sum(found["env_mask"][2]) == 0
    assert polar_reward([], found["polar_reward"], other=1) == [1.0, 0.0, None]


def test_verl_fields_are_one_row() -> None:
    """A session is its longest trace; a response is cut at its end, a prompt never."""
    first, second, failed = results()
    sample = main_sample(first)
    assert sample is not None
    found = output_fields(first, 10, 100)
    assert found["prompt_ids"] + found["response_ids"] == sample.ids.tolist()
    assert of_arrays(found["response_mask"], found["response_logprobs"], 4) == trained(sample)
    assert (found["reward_score"], found["num_turns"]) == (1.0, 6)
    cut = output_fields(second, 10, 3)
    assert (len(cut["response_ids"]), cut["extra_fields"]["polar_truncated"]) == (3, True)
    for masked, reason in (
        (output_fields(failed, 10, 10), "untrainable"),
        (output_fields(first, 3, 9), "prompt_too_long"),
    ):
        assert sum(masked["response_mask"]) == 0 and masked["extra_fields"]["polar_untrainable"] == reason


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_rows_are_in_the_order_of_the_prompts(step_wise: bool) -> None:
    """Step-wise every trace is a row, the last of a session marked; otherwise each session has one."""
    found = generator_output(results(), ["a", "b", "c"], step_wise)
    assert found["trajectory_ids"] == (["a", "a", "b", "c"] if step_wise else ["a", "b", "c"])
    assert found["is_last_step"] == ([False, True, True, True] if step_wise else None)
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    assert {len(found[name]) for name in names} == {len(found["trajectory_ids"])}
    sizes = [len(each) for each in found["response_ids"]]
    assert [len(each) for each in found["loss_masks"]] == [len(each) for each in found["rollout_logprobs"]] == sizes
    assert found["stop_reasons"][-2:] == ["length", "stop"]
    assert found["rollout_metrics"] == {"polar/sessions": 3, "polar/untrainable_sessions": 1}


def test_nemo_rl_logs_are_the_stream() -> None:
    """Entries laid end to end are the stream; assistants' entries alone have log-probabilities, one for each token."""
    for number, sample in enumerate(usable()):
        log = message_log(sample, np.asarray)
        assert np.concatenate([each["token_ids"] for each in log]).tolist() == sample.ids.tolist()
        assert [each["role"] for each in log[:2]] == ["user", "assistant"]
        place, found = 0, []
        for entry in log:
            if entry["role"] == "assistant":
                found += of_arrays([1] * len(entry["token_ids"]), entry["generation_logprobs"], place)
            place += len(entry["token_ids"])
        assert found == trained(sample)
        spec = datum_spec(sample, number, tensor=np.asarray)
        assert (spec["length"], spec["loss_multiplier"], spec["idx"]) == (len(sample), sample.weight, number)
    (row, *_) = gym_results(usable(), np.asarray)
    assert row["full_result"]["reward"] == 1.0 and len(row["input_message_log"]) == 1


def test_prime_rl_samples_are_as_long_as_the_stream() -> None:
    """Whole or parted, the mask picks the sampled tokens; what has no advantage is refused."""
    for sample in usable():
        found = training_sample(sample)
        lengths = {len(found[name]) for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")}
        assert lengths == {len(sample)}
        assert of_arrays(found["mask"], found["logprobs"], 0) == trained(sample)
        parted = training_sample(sample, parted=True)
        assert parted["prompt_ids"] + parted["completion_ids"] == sample.ids.tolist()
        assert parted["advantage"] == sample.advantage
    (unscored, *_) = samples_of(results()[0])
    with pytest.raises(SampleError, match="has no advantage"):
        training_sample(unscored)


def test_verifiers_nodes_are_a_path() -> None:
    """Each node's parent is the one before; log-probabilities are as many as sampled tokens."""
    for sample in usable():
        nodes = message_nodes(sample)
        assert [node["parent"] for node in nodes] == [None, *range(len(nodes) - 1)]
        assert sum((node["token_ids"] for node in nodes), []) == sample.ids.tolist()
        assert all(len(node.get("logprobs", [])) == sum(node["mask"]) for node in nodes)


def test_tinker_inputs_are_shifted() -> None:
    """Every array is one shorter than the stream, and each target stands beside its own log-probability."""
    for sample in usable():
        found = loss_inputs(sample)
        assert {len(each) for each in found.values()} == {len(sample) - 1}
        assert found["input"] == sample.ids[:-1].tolist() and found["target_tokens"].tolist() == sample.ids[1:].tolist()
        assert of_arrays(found["mask"], found["logprobs"], 1) == trained(sample)
        assert set(np.unique(found["advantages"])) <= {0.0, np.float32(sample.advantage)}


def test_nemo_gym_answers_with_real_rewards() -> None:
    """Each item's prompt is the stream before it; without a reward the sample is masked and the reason told."""
    first, _, failed = results()
    sample = main_sample(first)
    assert sample is not None
    row = {"responses_create_params": {"input": "find a"}, "instance": 7}
    found = verify_response(row, first)
    assert (found["reward"], found["mask_sample"], found["instance"]) == (1.0, False, 7)
    items = found["response"]["output"]
    assert [item["prompt_token_ids"] + item["generation_token_ids"] for item in items][-1] == sample.ids.tolist()
    together = [pair for item in items for pair in of_arrays(
        [1] * len(item["generation_token_ids"]), item["generation_log_probs"], len(item["prompt_token_ids"])
    )]  # fmt: skip
    assert together == trained(sample)
    masked = verify_response(row, failed)
    assert masked["mask_sample"] and masked["failure_reason"] == "no trace" and masked["response"]["output"] == []


@dataclass
class SlimeSample:
    """Slime's sample, as far as the bridge touches it."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


class Buffer:
    """Slime's data buffer: groups of a prompt as often as it is sampled."""

    def __init__(self, size: int) -> None:
        self.size, self.given = size, 0

    def get_samples(self, number: int) -> list[list[SlimeSample]]:
        groups = []
        for _ in range(number):
            index = self.given * self.size
            metadata = {"instance": {"image": f"image-{self.given}"}, "budget": 60}
            groups.append([SlimeSample(self.given, index + n, "mend it", metadata=metadata) for n in range(self.size)])
            self.given += 1
        return groups


class FakePolar:
    """Polar as the Slime bridge sees it: remembers tasks, ends their sessions when asked for a page."""

    def __init__(self) -> None:
        self.tasks: list[dict[str, Any]] = []
        self.waiting: list[dict[str, Any]] = []
        self.fail = False

    def feed_end(self) -> str:
        return "0"

    def submit_many(self, tasks: list[dict[str, Any]], concurrency: int = 8) -> list[None]:
        self.tasks += tasks
        self.waiting += tasks
        return [None] * len(tasks)

    def page(self, reader: Any) -> list[SessionResult]:
        task = self.waiting.pop(0)
        name = task["task_id"]
        bodies = [result(f"{name}-0", name, [trace(reward=1.0, seed=1), trace(reward=1.0, seed=2)])]
        bodies.append(result(f"{name}-1", name, [trace(reward=0.0, seed=3, finish_reason="length")]))
        bodies += [result(f"{name}-{n}", name, [], status="ERROR") for n in range(2, task["num_samples"])]
        if self.fail:
            bodies = [result(f"{name}-{n}", name, [], status="ERROR") for n in range(task["num_samples"])]
        return [SessionResult.read(body) for body in bodies]


TEMPLATE = {
    "agent": {"harness": "shell", "custom_shell": {"command": "echo ${HOME} {sample.metadata.instance.image}"}},
    "timeout_seconds": "{sample.metadata.budget}",
    "metadata": {"router": "{sglang.router_base_url}"},
}


def arguments(**changes: Any) -> SimpleNamespace:
    given = {"rollout_batch_size": 2, "update_weights_interval": 1, "sglang_router_ip": "10.0.0.1"}
    given |= {"sglang_router_port": 30000, "polar_rollout_url": "http://polar", "polar_task_template": TEMPLATE}
    return SimpleNamespace(**{**given, **changes})


def slime(args: SimpleNamespace) -> tuple[Rollouts, FakePolar]:
    polar = FakePolar()
    return Rollouts(args, SlimeConfig.of(args), SlimeSample, polar), polar  # type: ignore[arg-type]


def test_slime_groups_are_tasks() -> None:
    """A batch of groups comes back, a window of others stays under way, and templates are filled by type."""
    args = arguments()
    rollouts, polar = slime(args)
    batch, metrics = rollouts.step(5, Buffer(3))
    assert len(batch) == 2 and len(rollouts.owned) + len(rollouts.ready) == 2 and metrics["polar/groups"] == 2
    task = polar.tasks[1]
    assert (task["task_id"], task["num_samples"], task["timeout_seconds"]) == ("polar-slime-5-1", 3, 60)
    assert task["agent"]["custom_shell"]["command"] == "echo ${HOME} image-1"
    assert task["metadata"] == {
        "router": "http://10.0.0.1:30000",
        "policy_version": 5,
        "rollout_step": 5,
        "group_id": "1",
    }
    two, one, truncated, failed = batch[0]
    assert two.rollout_id == one.rollout_id != truncated.rollout_id
    assert truncated.status is SlimeSample.Status.TRUNCATED and failed.status is SlimeSample.Status.FAILED
    assert failed.remove_sample and sum(failed.loss_mask) == 0 and len(failed.tokens) == 2
    for each in batch[0]:
        assert each.response_length == len(each.loss_mask) == len(each.rollout_log_probs) <= len(each.tokens)
    raw, relative = post_process_rewards(args, batch[0])
    assert raw == [1.0, 1.0, 0.0, 0.0] and relative == [1.0, 1.0, -1.0, 0.0]
    assert post_process_rewards(arguments(polar_scoring_mode="individual"), batch[0])[1] == raw


def test_slime_drops_what_cannot_train_and_counts_why() -> None:
    """Stale groups, failed ones and those with too few completed sessions make room for others."""
    rollouts, polar = slime(arguments())
    buffer = Buffer(3)
    rollouts.step(0, buffer)
    _, metrics = rollouts.step(9, buffer)
    assert metrics["polar/dropped_stale"] == 2
    picky, _ = slime(arguments(polar_min_complete_accept_fraction=0.9))
    with pytest.raises(IndexError):
        picky.step(0, Stop(3, 4))
    rollouts, polar = slime(arguments(polar_max_async_level=1))
    polar.fail = True
    with pytest.raises(IndexError):
        rollouts.step(0, Stop(3, 6))
    assert len(polar.tasks) == 6, "each dropped group was replaced"


class Stop(Buffer):
    """A buffer that runs dry: the fake then has nothing to end, and raises."""

    def __init__(self, size: int, groups: int) -> None:
        super().__init__(size)
        self.groups = groups

    def get_samples(self, number: int) -> list[list[SlimeSample]]:
        return super().get_samples(min(number, self.groups - self.given))


def test_slime_keys_are_checked(tmp_path: Any) -> None:
    """Unknown keys, missing ones and values that cannot be are named; a topology names the API."""
    with pytest.raises(ValueError, match="polar_task_templat is no key"):
        SlimeConfig.of(arguments(polar_task_templat="x"))
    with pytest.raises(ValueError, match="polar_task_template is missing"):
        SlimeConfig.of(arguments(polar_task_template=None))
    with pytest.raises(ValueError, match="group or individual"):
        SlimeConfig.of(arguments(polar_scoring_mode="each"))
    with pytest.raises(ValueError, match="polar_rollout_url, or polar_topology_path"):
        _ = SlimeConfig.of(arguments(polar_rollout_url=None)).url
    path = tmp_path / "topology.yaml"
    path.write_text("rollout: {host: 0.0.0.0, port: 9000}\n")
    found = SlimeConfig.of(arguments(polar_rollout_url=None, polar_topology_path=str(path)))
    assert found.url == "http://127.0.0.1:9000" and found.max_off_policy_steps(arguments()) == 3


def test_templates_keep_types_and_braces(tmp_path: Any) -> None:
    """A place alone keeps its value's type; a place that is not known is named; other braces stay."""
    values = {"row": {"n": 3, "tags": ["a"]}}
    assert fill({"a": "{row.n}", "b": ["x{row.n}"], "c": "{row.tags}"}, values) == {"a": 3, "b": ["x3"], "c": ["a"]}
    assert fill("${HOME} {unknown} {}", values) == "${HOME} {unknown} {}"
    with pytest.raises(SampleError, match="no 'missing'"):
        fill("{row.missing}", values)
    path = tmp_path / "task.yaml"
    path.write_text("agent: {harness: pi}\n")
    assert load(path) == load('{"agent": {"harness": "pi"}}') == {"agent": {"harness": "pi"}}
    runner = Runner("http://x", None, {"task_id": "t", "max_turns": "{row.n}"})
    task = runner.task([{"role": "user", "content": [{"type": "text", "text": "go"}]}], 4, **values)
    assert (task["instruction"], task["num_samples"], task["max_turns"]) == ("go", 4, 3)
    assert task["task_id"].startswith("t-") and instruction([{"role": "system", "content": "s"}]) == "s"
