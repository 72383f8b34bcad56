"""What bridges make, given to the trainers' own types. Each test needs its package: `make test-trainers`."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.client import SessionResult
from polar.trainers import Sample, advantages, samples_of
from tests.contracts.test_trainers import results, trained

MODEL = Path(__file__).parents[2] / "polar" / "tiny_engine" / "model"


def package(name: str, python: tuple[int, int] = (3, 11)) -> Any:
    """The package, or a skip that says how to get it; where all were asked for, none may be missing."""
    if sys.version_info < python:
        pytest.skip(f"{name} needs Python {python[0]}.{python[1]}")
    if os.environ.get("POLAR_TEST_TRAINERS") == "all":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed; `make test-trainers` installs it")


def scored() -> list[Sample]:
    """Samples with advantages."""
    samples = [sample for each in results() for sample in samples_of(each)]
    advantages(samples)
    return samples


def test_tinker_takes_the_datums() -> None:
    """Datums are made of Tinker's own classes, which check lengths, and give the trained tokens back."""
    tinker = package("tinker")
    from polar.trainers.tinker import datums

    samples = scored()
    for sample, datum in zip(samples, datums(samples, weigh=True), strict=True):
        assert isinstance(datum, tinker.Datum) and datum.model_input.length == len(sample) - 1
        inputs = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
        places = np.flatnonzero(inputs["mask"])
        assert [(int(at) + 1, float(inputs["logprobs"][at])) for at in places] == trained(sample)
        assert inputs["target_tokens"][places].tolist() == sample.ids[places + 1].tolist()
    assert "mask" not in datums(samples, with_mask=False)[0].loss_fn_inputs


def test_verifiers_reads_the_nodes_back() -> None:
    """A verifiers branch of our nodes has our stream, mask, log-probabilities and advantages."""
    package("verifiers")
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch

    from polar.trainers.prime_rl import message_nodes

    for sample in scored():
        nodes = [MessageNode.model_validate(node) for node in message_nodes(sample)]
        branch = Branch(index=0, nodes=nodes)
        assert branch.token_ids == sample.ids.tolist()
        places = np.flatnonzero(branch.sampled_mask)
        assert [(int(at), branch.logprobs[at]) for at in places] == trained(sample)
        assert branch.advantages is not None and branch.advantages[places[0]] == sample.advantage


def test_verl_takes_the_output() -> None:
    """verl's own AgentLoopOutput validates the fields and makes its tensors of them; the loop is one of verl's."""
    package("verl")
    loop = importlib.import_module("verl.experimental.agent_loop.agent_loop")
    from polar.trainers.verl import PolarAgentLoop, output_fields

    assert issubclass(PolarAgentLoop, loop.AgentLoopBase)
    for each in results():
        made = loop.AgentLoopOutput(metrics=loop.AgentLoopMetrics(), **output_fields(each, 10, 100))
        tensors = made.as_dict()
        assert tensors["responses"].shape == tensors["response_mask"].shape == tensors["rollout_log_probs"].shape


def test_trl_trains_on_our_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPOTrainer, on the tiny model, takes a step on our rows; a session that failed stays out of the baseline."""
    trl = package("trl")
    datasets, transformers = package("datasets"), package("transformers")
    from polar.trainers.trl import PolarRollouts, polar_reward

    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    rollouts = PolarRollouts("http://unused", None, {"agent": {"harness": "pi"}})
    seen: list[int] = []

    def run(tasks: list[dict[str, Any]]) -> list[list[SessionResult]]:
        # The sessions are made by hand: what is under test is TRL's side.
        seen.extend(task["num_samples"] for task in tasks)
        return [results() + results()[:1] for _ in tasks]

    monkeypatch.setattr(rollouts.runner, "run", run)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_steps=1,
        max_completion_length=32, report_to=[], use_cpu=True, bf16=False, learning_rate=1e-3,
        save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model, processing_class=tokenizer, args=config, reward_funcs=polar_reward, rollout_func=rollouts,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["find a"] * 4}),
    )  # fmt: skip
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.train()
    assert seen == [4], "the prompt is sampled four times, so it is one task of four sessions"
    logged = trainer.state.log_history[0]
    assert logged["reward"] == pytest.approx(2 / 3), "the mean over the three sessions that have a reward"
    assert any(
        not np.array_equal(before[name].numpy(), value.detach().numpy()) for name, value in model.named_parameters()
    )


def test_skyrl_names_the_same_fields() -> None:
    """Every key that we give is one of SkyRL's GeneratorOutput."""
    package("skyrl", (3, 12))
    base = importlib.import_module("skyrl.train.generators.base")
    from polar.trainers.skyrl import generator_output

    ids = [base.TrajectoryID("row", number) for number in range(3)]
    found = generator_output(results(), ids, step_wise=True)
    assert set(found) <= set(base.GeneratorOutput.__annotations__)
    assert dataclasses.is_dataclass(base.TrajectoryID)


def test_nemo_gym_takes_the_answer() -> None:
    """Gym's own BaseVerifyResponse validates the answer, token fields and all."""
    package("nemo_gym", (3, 13))
    base = importlib.import_module("nemo_gym.base_resources_server")
    from polar.trainers.nemo_gym import verify_response

    row = {"responses_create_params": {"input": [{"role": "user", "content": "find a"}]}}
    for each in results():
        found = base.BaseVerifyResponse.model_validate(verify_response(row, each))
        items = found.response.output
        assert all(item.generation_token_ids and item.generation_log_probs for item in items)
        assert found.mask_sample == (not items)
