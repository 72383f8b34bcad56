"""SWE-bench's grading on instances made here: the package's own code decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case
from polar.evaluators.swebench_harness import SwebenchHarness

MakeCase = Callable[..., Case]
SCRIPT = """#!/bin/bash
set -uxo pipefail
: '>>>>> Start Test Output'
cat results; exit_with=$(cat code); (exit $exit_with)
: '>>>>> End Test Output'
"""
INSTANCE: dict[str, Any] = {
    "instance_id": "own__thing-7",
    "image": "none",
    "repo": "own/thing",
    "version": "1.0",
    "FAIL_TO_PASS": '["t.py::test_new"]',
    "PASS_TO_PASS": '["t.py::test_old"]',
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
    "eval_script": SCRIPT,
}


def evaluator(**changes: Any) -> SwebenchHarness:
    """One whose patch is never empty, so that the tests alone decide."""
    config = {"instance": INSTANCE, "repo_dir": ".", "patch_command": "echo changed"}
    return SwebenchHarness(**(config | changes))


def judged(make: MakeCase, results: str, code: int = 0) -> Case:
    case = make()
    assert case.runtime is not None
    folder = Path(case.runtime.workdir)
    (folder / "results").write_text(results)
    (folder / "code").write_text(str(code))
    return case


@pytest.mark.parametrize(
    ("results", "code", "reward"),
    [
        ("PASSED t.py::test_new\nPASSED t.py::test_old\n", 0, 1.0),
        ("PASSED t.py::test_new\nSKIPPED t.py::test_old\n", 0, 1.0),
        ("PASSED t.py::test_new\nPASSED t.py::test_old\nFAILED t.py::test_other - no\n", 1, 1.0),
        ("PASSED t.py::test_new\nFAILED t.py::test_old\n", 1, 0.0),
        ("FAILED t.py::test_new\nPASSED t.py::test_old\n", 1, 0.0),
        ("PASSED t.py::test_new\n", 0, 0.0),
        ("PASSED t.py::test_new\nPASSED t.py::test_old\n", 1, 0.0),
        ("PASSED t.py::test_new\nFAILED t.py::test_new\nPASSED t.py::test_old\nPASSED t.py::test_new\n", 1, 0.0),
        ("", 0, 0.0),
    ],
)
def test_grading(case: MakeCase, results: str, code: int, reward: float) -> None:
    """The package's rules: mended and kept whole, and an exit code that fits; and no test with two ends."""
    verdict = evaluator().evaluate(judged(case, results, code))
    assert verdict.outcome_reward == reward
    assert verdict.evidence["report"]["instance_id"] == "own__thing-7"
    if reward:
        assert verdict.evidence["report"]["tests_status"]["FAIL_TO_PASS"]["success"] == ["t.py::test_new"]


def test_a_dataset_file_has_the_instance(case: MakeCase, tmp_path: Path) -> None:
    """Loaded by the package, from lines of JSON; an instance that is not in there is an error."""
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text("\n".join(json.dumps({**INSTANCE, "instance_id": name}) for name in ("a__a-1", "own__thing-7")))
    place = judged(case, "PASSED t.py::test_new\nPASSED t.py::test_old\n")
    found = evaluator(instance=None, dataset=str(dataset), instance_id="own__thing-7")
    assert found.evaluate(place).outcome_reward == 1.0
    with pytest.raises(EvaluatorError) as caught:
        evaluator(instance=None, dataset=str(dataset), instance_id="own__thing-8").evaluate(place)
    assert caught.value.code == "no_instance"


def test_a_script_larger_than_an_argument_may_be(case: MakeCase) -> None:
    """Scripts hold test patches, which may be long."""
    long = SCRIPT.replace("cat results", "cat <<'EOF' > /dev/null\n" + "x" * 300_000 + "\nEOF\ncat results")
    place = judged(case, "PASSED t.py::test_new\nPASSED t.py::test_old\n")
    assert evaluator(instance={**INSTANCE, "eval_script": long}).evaluate(place).outcome_reward == 1.0


def test_tests_do_not_come_across_the_script(case: MakeCase) -> None:
    """Its markers are in no file that they could list and in no file that is open to them."""
    look = "cat results; ls -a $HOME; ls -l /proc/self/fd; env; (exit $(cat code))\n"
    place = judged(case, "PASSED t.py::test_new\nPASSED t.py::test_old\n")
    script = SCRIPT.replace("cat results; exit_with=$(cat code); (exit $exit_with)\n", look)
    verdict = evaluator(instance={**INSTANCE, "eval_script": script}).evaluate(place)
    assert verdict.outcome_reward == 1.0
    assert "polar-" not in verdict.evidence["report"]["output"].replace(
        str(place.runtime and place.runtime.workdir), ""
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"instance": None}, "instance"),
        ({"dataset": "x.jsonl", "instance_id": "a"}, "instance"),
        ({"instance": None, "dataset": "x.jsonl"}, "instance_id"),
        ({"instance": {**INSTANCE, "eval_script": "true"}}, "instance"),
        ({"instance": {"instance_id": "a"}}, "instance"),
        ({"instance": "{"}, "instance"),
        ({"instnace": {}}, "instnace"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], field: str) -> None:
    """A wrong setting is refused when the evaluator is made, at its own path."""
    with pytest.raises(SpecError) as caught:
        evaluator(**changes)
    assert caught.value.errors[0][0] == f"evaluator.config.{field}"


def test_an_unknown_log_parser_is_an_error(case: MakeCase) -> None:
    """Nobody can read the log, so there is no verdict."""
    with pytest.raises(EvaluatorError) as caught:
        evaluator(instance={**INSTANCE, "log_parser": "parse_tea_leaves"}).evaluate(judged(case, ""))
    assert caught.value.code == "bad_instance"
