"""What every evaluator must do, run over each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar import evaluators
from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.runtimes.base import Limits, Runtime
from polar.runtimes.local import LocalRuntime
from polar.spec import EvaluatorSpec, RuntimeSpec, parse_task
from tests.fakes.judge import judge

EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
: '>>>>> Start Test Output'
echo PASSED a.py::test_it
: '>>>>> End Test Output'
"""
HARBOR = {"tests_target": "tests", "verifier_dir": "logs"}
CONFIGS: dict[str, dict[str, Any]] = {
    "answer_match": {"answers": "42"},
    "command": {"command": "true"},
    "harbor": HARBOR,
    "harbor_rubric": {**HARBOR, "judge_model": "judge", "judge_format": "none"},
    "session_completed": {},
    "swebench_harness": {
        "instance": {
            "instance_id": "own__one-1",
            "repo": "own/one",
            "version": "1",
            "FAIL_TO_PASS": ["a.py::test_it"],
            "PASS_TO_PASS": [],
            "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail",
            "eval_script": EVAL_SCRIPT,
        },
        "patch_command": "echo changed",
        "repo_dir": ".",
    },
    "test_on_output": {
        "test_command": "echo PASSED a.py::test_it",
        "expected_output_json": {"test_it": "PASSED"},
        "patch_command": "echo changed",
        "repo_dir": ".",
    },
}
"""What each is made with; the places of tests and judge come from the fixture."""
SCORES = {"traces": [{"scores": {"rubric": 0}, "reason": "neither good nor bad"}]}
TASK = parse_task({"task_id": "t", "instruction": "do", "agent": {"harness": "codex"}})
TRACE = {
    "prompt_messages": [],
    "response_messages": [{"role": "assistant", "content": "42"}],
    "finish_reason": "stop",
    "metadata": {},
}


def test_every_member_is_covered() -> None:
    """A new evaluator is held to the contract, too."""
    assert set(CONFIGS) == set(evaluators.EVALUATORS)


@pytest.fixture(scope="module")
def judge_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A judge behind real HTTP: the scripted engine, which always finds the same."""
    with judge([{"content": json.dumps(SCORES)}], tmp_path_factory.mktemp("judge")) as url:
        yield url


@pytest.fixture(params=sorted(CONFIGS))
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> EvaluatorSpec:
    config = dict(CONFIGS[request.param])
    if request.param.startswith("harbor"):
        tests = tmp_path / "of the task"
        tests.mkdir()
        (tests / "test.sh").write_text("#!/bin/sh\necho 1 > logs/reward.txt\n")
        (tests / "rubric.md").write_text("Was it done well?\n")
        config["tests_dir"] = str(tests)
    if "judge_model" in config:
        config["judge_base_url"] = request.getfixturevalue("judge_url")
    return EvaluatorSpec(strategy=request.param, config=config)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    runtime = LocalRuntime(RuntimeSpec(backend="local"), "s", tmp_path / "runtime")
    runtime.start(Limits(30))
    yield runtime
    runtime.destroy()


def case(tmp_path: Path, runtime: Runtime | None, **changes: Any) -> Case:
    values: dict[str, Any] = {
        "task": TASK,
        "session_id": "s",
        "traces": [TRACE],
        "agent_exit": {"state": "completed"},
        "runtime": runtime,
        "env": {},
        "limits": Limits(60),
        "logs": tmp_path / "logs",
    }
    return Case(**(values | changes))


def test_a_good_session_gets_a_verdict(spec: EvaluatorSpec, runtime: Runtime, tmp_path: Path) -> None:
    """The verdict is a finite number with evidence that is JSON."""
    verdict = evaluators.create(spec).evaluate(case(tmp_path, runtime))
    assert verdict.outcome_reward is not None
    assert math.isfinite(verdict.outcome_reward)
    assert verdict.outcome_reward == 1.0
    assert verdict.evidence
    assert orjson.dumps(verdict.evidence)


def test_the_same_again(spec: EvaluatorSpec, runtime: Runtime, tmp_path: Path) -> None:
    """An attempt after one that was lost reaches the same verdict with the same evidence."""
    evaluator = evaluators.create(spec)
    assert evaluator.evaluate(case(tmp_path, runtime)) == evaluator.evaluate(case(tmp_path, runtime))


def test_without_a_runtime(spec: EvaluatorSpec, tmp_path: Path) -> None:
    """One that runs commands says that it cannot; one that does not, needs none."""
    evaluator = evaluators.create(spec)
    if evaluator.NEEDS_RUNTIME:
        with pytest.raises(EvaluatorError) as caught:
            evaluator.evaluate(case(tmp_path, None))
        assert caught.value.code == "no_runtime"
    else:
        assert evaluator.evaluate(case(tmp_path, None)).outcome_reward == 1.0


def test_without_time_there_is_no_verdict(spec: EvaluatorSpec, runtime: Runtime, tmp_path: Path) -> None:
    """A command for which the session has no time left is an error, not a reward of zero; others take none."""
    evaluator, late = evaluators.create(spec), case(tmp_path, runtime, limits=Limits(0.0))
    if evaluator.NEEDS_RUNTIME:
        with pytest.raises(EvaluatorError):
            evaluator.evaluate(late)
    else:
        assert evaluator.evaluate(late).outcome_reward == 1.0


def test_an_unknown_setting_is_refused_by_name(spec: EvaluatorSpec) -> None:
    """The error stands at the setting's own path."""
    wrong = spec.model_copy(update={"config": {**spec.config, "typo": 1}})
    with pytest.raises(SpecError) as caught:
        evaluators.create(wrong)
    assert ("evaluator.config.typo", "unknown field") in caught.value.errors


def test_names_match_the_table(spec: EvaluatorSpec) -> None:
    """A member calls itself what the table calls it."""
    assert evaluators.create(spec).name == spec.strategy


def test_an_unknown_evaluator_is_refused() -> None:
    """The error stands at evaluator.strategy and lists what there is."""
    with pytest.raises(SpecError, match="command, harbor, harbor_rubric, session_completed") as caught:
        evaluators.create(EvaluatorSpec(strategy="nonesuch"))
    assert caught.value.errors[0][0] == "evaluator.strategy"


class OwnEvaluator(Evaluator):
    """A user's own, with its keywords spelled out."""

    name = "own"

    def __init__(self, *, bonus: float) -> None:
        self.bonus = bonus

    def evaluate(self, case: Case) -> Verdict:
        return Verdict(self.bonus)


def test_a_class_of_ones_own_is_taken(tmp_path: Path) -> None:
    """`module:Class` names an evaluator, and its own refusal of a keyword becomes an error at evaluator.config."""
    path = f"{OwnEvaluator.__module__}:OwnEvaluator"
    own = evaluators.create(EvaluatorSpec(strategy=path, config={"bonus": 2}))
    assert own.evaluate(case(tmp_path, None)).outcome_reward == 2
    with pytest.raises(SpecError) as caught:
        evaluators.create(EvaluatorSpec(strategy=path, config={"malus": 2}))
    assert caught.value.errors[0][0] == "evaluator.config"
