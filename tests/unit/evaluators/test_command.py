"""The command evaluator against a real shell: each way to a reward, and each way to none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case
from polar.evaluators.command import Command

MakeCase = Callable[..., Case]


@pytest.mark.parametrize(
    ("config", "reward"),
    [
        ({"command": "true"}, 1.0),
        ({"command": "exit 3"}, 0.0),
        ({"command": "true", "success_reward": 5}, 5.0),
        ({"command": "false", "failure_reward": -1}, -1.0),
        ({"command": "echo noise; echo 0.25; echo", "reward_from": "stdout"}, 0.25),
        ({"command": "echo -1e-3 > r.txt", "reward_from": "file", "reward_file": "r.txt"}, -0.001),
        ({"command": "mkdir d; cd d; echo 2 > r", "reward_from": "file", "reward_file": "d/r"}, 2.0),
        ({"command": 'test "$TASK_SECRET" = 42'}, 1.0),
    ],
)
def test_rewards(case: MakeCase, config: dict[str, Any], reward: float) -> None:
    """The reward is read from where the task says it is."""
    assert Command(**config).evaluate(case(env={"TASK_SECRET": "42"})).outcome_reward == reward


def test_evidence(case: MakeCase) -> None:
    """What ran, how it ended and what it said are kept, the end of long output included."""
    config = {"command": "seq 100000; echo oops >&2; exit 1"}
    evidence = Command(**config).evaluate(case()).evidence
    assert (evidence["command"], evidence["exit_code"]) == (config["command"], 1)
    assert evidence["stdout"].endswith("100000\n")
    assert len(evidence["stdout"]) <= 8000
    assert evidence["stderr"] == "oops\n"


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"command": "/nonesuch/program"}, "command_not_run"),
        ({"command": "exit 126"}, "command_not_run"),
        ({"command": "sleep 60", "timeout_seconds": 0.2}, "evaluator_timeout"),
        ({"command": "echo high", "reward_from": "stdout"}, "bad_reward"),
        ({"command": "true", "reward_from": "stdout"}, "bad_reward"),
        ({"command": "echo nan", "reward_from": "stdout"}, "bad_reward"),
        ({"command": "echo 1; exit 1", "reward_from": "stdout"}, "command_failed"),
        ({"command": "true", "reward_from": "file", "reward_file": "r.txt"}, "no_reward_file"),
        ({"command": "touch r.txt", "reward_from": "file", "reward_file": "r.txt"}, "bad_reward"),
    ],
)
def test_no_verdict(case: MakeCase, config: dict[str, Any], code: str) -> None:
    """A command that says nothing usable ends in an error of its own, never in a reward."""
    with pytest.raises(EvaluatorError) as caught:
        Command(**config).evaluate(case())
    assert caught.value.code == code


def test_the_sessions_own_budget_bounds_it(case: MakeCase) -> None:
    """Where the session has less time left than the command may take, the session's time counts."""
    with pytest.raises(EvaluatorError) as caught:
        Command(command="sleep 60").evaluate(case(seconds=0.2))
    assert caught.value.code == "evaluator_timeout"


def test_a_cancelled_session_has_no_verdict(case: MakeCase) -> None:
    """A command that was stopped from outside is not one that failed."""
    stopped = case()
    stopped.limits.cancelled.set()
    with pytest.raises(EvaluatorError) as caught:
        Command(command="sleep 60").evaluate(stopped)
    assert caught.value.code == "evaluator_stopped"


def test_an_old_reward_file_of_the_node_is_not_read(case: MakeCase) -> None:
    """What an earlier attempt at the stage fetched does not stand in for what this one should."""
    judged = case()
    (judged.logs / "reward_file").write_text("1")
    with pytest.raises(EvaluatorError):
        Command(command="true", reward_from="file", reward_file="r").evaluate(judged)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "command"),
        ({"command": " "}, "command"),
        ({"command": "true", "timeout_seconds": 0}, "timeout_seconds"),
        ({"command": "true", "reward_from": "stderr"}, "reward_from"),
        ({"command": "true", "reward_from": "file"}, "reward_file"),
        ({"command": "true", "reward_file": "r"}, "reward_file"),
        ({"command": "true", "success_reward": float("nan")}, "success_reward"),
    ],
)
def test_settings_that_cannot_be(config: dict[str, Any], field: str) -> None:
    """A wrong setting is refused when the evaluator is made, at its own path."""
    with pytest.raises(SpecError) as caught:
        Command(**config)
    assert caught.value.errors[0][0] == f"evaluator.config.{field}"


def test_cwd(case: MakeCase) -> None:
    """The command runs where the task says, and a reward file is looked for there."""
    judged = case()
    assert judged.runtime is not None
    (Path(judged.runtime.workdir) / "below").mkdir()
    evaluator = Command(command="echo 3 > r", cwd="below", reward_from="file", reward_file="r")
    assert evaluator.evaluate(judged).outcome_reward == 3.0
