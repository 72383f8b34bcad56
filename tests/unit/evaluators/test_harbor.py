"""Harbor's verifier: its places, its files, its rewards. Places are below the workdir, for want of an own root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import EvaluatorError, PrepareError, SpecError
from polar.evaluators.base import Case
from polar.evaluators.harbor import Harbor, read_task
from polar.runtimes.base import Limits
from polar.runtimes.local import LocalRuntime

MakeCase = Callable[..., Case]
PLACES = {"tests_target": "tests", "verifier_dir": "logs/verifier"}
TOML = """schema_version = "1.0"
artifacts = ["made"]

[verifier]
timeout_sec = 30.0

[verifier.env]
PLAIN = "plain"
GIVEN = "${SECRET}"
DEFAULT = "${NOT_SET:-fallback}"

[environment]
"""


def write(tmp_path: Path, script: str) -> str:
    tests = tmp_path / "of the task"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    return str(tests)


def into(name: str, text: str) -> str:
    return f"cat > logs/verifier/{name} <<'EOF'\n{text}\nEOF"


@pytest.mark.parametrize(
    ("script", "config", "reward"),
    [
        (into("reward.txt", "0.25"), {}, 0.25),
        (into("reward.json", "0.5"), {}, 0.5),
        (into("reward.json", '{"reward": 1}'), {}, 1.0),
        (into("reward.json", '{"speed": 0, "style": 0.5}'), {}, 0.25),
        (into("reward.json", '{"speed": 0, "style": 0.5}'), {"reward_key": "style"}, 0.5),
        (into("reward.json", "1") + "\n" + into("reward.txt", "0"), {}, 1.0),
        (into("reward.txt", "7"), {}, 1.0),
        (into("reward.txt", "-7"), {}, 0.0),
        (into("reward.txt", "7"), {"clamp": False}, 7.0),
        (into("reward.txt", "1") + "\nexit 3", {}, 1.0),
        ('cd "$(dirname "$0")" && test -f test.sh && echo 1 > ../logs/verifier/reward.txt', {}, 1.0),
        ("true", {"test_command": "echo 0.75 > logs/verifier/reward.txt"}, 0.75),
    ],
)
def test_rewards(case: MakeCase, tmp_path: Path, script: str, config: dict[str, Any], reward: float) -> None:
    """The number is the one that Harbor would read, made one number."""
    verdict = Harbor(tests_dir=write(tmp_path, script), **PLACES, **config).evaluate(case())
    assert verdict.outcome_reward == reward
    assert set(verdict.evidence) >= {"stdout", "stderr", "exit_code", "rewards", "clamped"}


@pytest.mark.parametrize(
    ("script", "config", "code"),
    [
        ("true", {}, "no_reward_file"),
        (into("reward.txt", "high"), {}, "bad_reward"),
        (into("reward.txt", "nan"), {}, "bad_reward"),
        (into("reward.txt", ""), {}, "bad_reward"),
        (into("reward.json", "{}"), {}, "bad_reward"),
        (into("reward.json", '{"a": "1"}'), {}, "bad_reward"),
        (into("reward.json", '{"a": 1e999}'), {}, "bad_reward"),
        (into("reward.json", "[" * 100_000), {}, "bad_reward"),
        (into("reward.json", '{"a": 1}'), {"reward_key": "b"}, "bad_reward"),
        (into("reward.txt", "1") + "\nexit 3", {"require_exit_zero": True}, "tests_broke"),
        ("sleep 60", {"verifier_timeout": 0.5}, "evaluator_timeout"),
        ("exit 127", {}, "command_not_run"),
    ],
)
def test_no_verdict(case: MakeCase, tmp_path: Path, script: str, config: dict[str, Any], code: str) -> None:
    """Tests that leave nothing usable end in an error of their own, never in a reward."""
    with pytest.raises(EvaluatorError) as caught:
        Harbor(tests_dir=write(tmp_path, script), **PLACES, **config).evaluate(case())
    assert caught.value.code == code


def a_task(tmp_path: Path, script: str, toml: str = TOML) -> str:
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "tests/test.sh").write_text(f"#!/bin/bash\n{script}\n")
    return str(folder)


def test_variables_come_from_the_evaluators_env(case: MakeCase, tmp_path: Path) -> None:
    """Plain, by name, by default; and one that nobody gave is an error that says where to give it."""
    folder = a_task(tmp_path, 'test "$PLAIN $GIVEN $DEFAULT" = "plain s3 fallback" && ' + into("reward.txt", "1"))
    assert Harbor(task_dir=folder, **PLACES).evaluate(case(env={"SECRET": "s3"})).outcome_reward == 1.0
    with pytest.raises(EvaluatorError, match="evaluator.env.SECRET"):
        Harbor(task_dir=folder, **PLACES).evaluate(case())


def test_only_artifacts_travel(case: MakeCase, tmp_path: Path, runtimes: Callable[[str], LocalRuntime]) -> None:
    """In a fresh runtime are what task.toml names, as the agent left it, and nothing else of the agent's."""
    works, fresh = runtimes("agent"), runtimes("fresh")
    for runtime in (works, fresh):
        assert runtime.exec("mkdir made; echo image > made/from-image", limits=Limits(30)).ok
    assert works.exec("rm made/*; echo 1 > made/new; echo 1 > other", limits=Limits(30)).ok
    folder = a_task(
        tmp_path,
        "test -e made/new && ! test -e made/from-image && ! test -e other && echo 1 > logs/verifier/reward.txt",
    )
    verdict = Harbor(task_dir=folder, **PLACES).evaluate(case(runtime=fresh, agent_runtime=works, env={"SECRET": "x"}))
    assert verdict.outcome_reward == 1.0
    assert verdict.evidence["carried"] == ["made"]


@pytest.mark.parametrize(
    ("toml", "code"),
    [
        ("[[steps]]\nname = 'one'\n", "unsupported_task"),
        ("[environment]\nos = 'windows'\n", "unsupported_task"),
        ("artifacts = [{source = '/a', service = 'db'}]\n", "unsupported_task"),
        ("[[[", "no_task"),
    ],
)
def test_tasks_that_polar_cannot_do(tmp_path: Path, toml: str, code: str) -> None:
    """They are refused with the reason; nothing of them is left out in silence."""
    with pytest.raises(EvaluatorError) as caught:
        read_task(Path(a_task(tmp_path, "true", toml)))
    assert caught.value.code == code


def test_the_nodes_files_are_asked_for(case: MakeCase, tmp_path: Path) -> None:
    """A folder of tests is brought in only if a task may bring it in."""

    def refuse(_: Path) -> None:
        raise PrepareError("not this one", code="source_refused")

    with pytest.raises(PrepareError):
        Harbor(tests_dir=write(tmp_path, "true"), **PLACES).evaluate(case(check_source=refuse))


@pytest.mark.parametrize(
    ("config", "field"),
    [({}, "task_dir"), ({"task_dir": "a", "tests_dir": "b"}, "task_dir"), ({"tests_dir": "a", "typo": 1}, "typo")],
)
def test_settings_that_cannot_be(config: dict[str, Any], field: str) -> None:
    """A wrong setting is refused when the evaluator is made, at its own path."""
    with pytest.raises(SpecError) as caught:
        Harbor(**config)
    assert caught.value.errors[0][0] == f"evaluator.config.{field}"
