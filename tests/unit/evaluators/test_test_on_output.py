"""The original's rules for tests by their output, on real repositories where a patch matters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case
from polar.evaluators.ends import parse_ends, short_name
from polar.evaluators.patches import without_excluded
from polar.evaluators.test_on_output import TestOnOutput
from polar.runtimes.base import Limits
from polar.runtimes.local import LocalRuntime
from polar.spec import parse_task

MakeCase = Callable[..., Case]
MakeRuntime = Callable[[str], LocalRuntime]
EXPECTED = {"tests/test_a.py::TestX::test_one": "PASSED", "test_two": "FAILED"}
REPOSITORY = """
export GIT_CONFIG_GLOBAL=/dev/null
git init -q . && printf 'one\\ntwo\\nthree\\n' > file.txt && git add -A
git -c user.name=n -c user.email=e@e commit -qm begin
"""
TESTS = "grep -q changed file.txt && echo PASSED t.py::test_it || echo FAILED t.py::test_it"


def lines(*ends: str) -> str:
    return "printf '%s\\n' " + " ".join(f"'{end}'" for end in ends)


def evaluator(**changes: Any) -> TestOnOutput:
    """One whose patch is never empty, so that the tests' output alone decides."""
    config = {
        "test_command": "true",
        "expected_output_json": EXPECTED,
        "patch_command": "echo something",
        "repo_dir": ".",
    }
    return TestOnOutput(**(config | changes))


@pytest.mark.parametrize(
    ("ends", "reward"),
    [
        (["PASSED a.py::TestX::test_one", "FAILED b.py::test_two - AssertionError: no"], 1.0),
        (["noise", "  PASSED a.py::TestX::test_one", "FAILED b.py::test_two", "1 failed"], 1.0),
        (["PASSED a.py::TestX::test_one"], 0.0),
        (["PASSED a.py::TestX::test_one", "PASSED b.py::test_two"], 0.0),
        (["PASSED a.py::TestX::test_one", "FAILED b.py::test_two", "SKIPPED c.py::test_three"], 0.0),
        (["all is well"], 0.0),
    ],
)
def test_ends_must_be_exactly_as_expected(case: MakeCase, ends: list[str], reward: float) -> None:
    """One test more, one fewer or one that ended otherwise is 0.0."""
    verdict = evaluator(test_command=f"{lines(*ends)}; exit 1").evaluate(case())
    assert verdict.outcome_reward == reward
    assert verdict.evidence["report"]["exit_code"] == 1


def test_both_streams_are_read_whole(case: MakeCase) -> None:
    """Ends count wherever in the output they stand, however much there is of it."""
    flood = "head -c 3000000 /dev/zero | tr '\\0' 'x'; echo"
    command = f"{flood}; echo PASSED a::TestX::test_one; {flood}; echo FAILED a::test_two >&2"
    assert evaluator(test_command=command).evaluate(case()).outcome_reward == 1.0


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/a.py::TestX::test_y", "TestX.test_y"),
        ("tests/a.py::Outer::Inner::test_y", "Inner.test_y"),
        ("tests/a.py::test_y[1-2]", "test_y[1-2]"),
        ("test_y", "test_y"),
        ("tests/a.py::test_y - ValueError: a::b", "test_y"),
        ("[1] tests/a.py:3: not today", "[1] tests/a.py:3: not today"),
    ],
)
def test_short_names(test: str, name: str) -> None:
    """Of a node id, the class and function are kept."""
    assert short_name(test) == name


def test_parsing_sees_through_colour() -> None:
    """Escape codes and carriage returns are no part of a line; a status without a test is none."""
    assert parse_ends("\x1b[32mPASSED\x1b[0m a::test_one\r\nFAILED\nERROR\ta::test_two") == {
        "test_one": "PASSED",
        "test_two": "ERROR",
    }


def test_an_empty_patch_is_zero_without_tests(case: MakeCase) -> None:
    """An agent that changed nothing gets 0.0, and no test runs."""
    verdict = evaluator(patch_command="true", test_command="touch ran").evaluate(judged := case())
    assert verdict.outcome_reward == 0.0
    assert verdict.evidence["report"]["empty_generation"]
    assert judged.runtime is not None
    assert not (Path(judged.runtime.workdir) / "ran").exists()


def repository(runtime: LocalRuntime, then: str = "") -> LocalRuntime:
    result = runtime.exec(f"set -e; {REPOSITORY}\n{then}", limits=Limits(30))
    assert result.ok, result.summary()
    return runtime


CHANGE = "printf 'one\\nchanged \\377\\nthree\\n' > file.txt"


def in_repository(runtime: LocalRuntime) -> TestOnOutput:
    return evaluator(
        patch_command=None,
        repo_dir=runtime.workdir,
        test_command=TESTS,
        expected_output_json=json.dumps({"test_it": "PASSED"}),
    )


def test_the_agents_own_runtime(case: MakeCase, runtimes: MakeRuntime) -> None:
    """Without a fresh runtime, tests run where the agent worked."""
    runtime = repository(runtimes("agent"), CHANGE)
    assert in_repository(runtime).evaluate(case(runtime=runtime)).outcome_reward == 1.0


def fresh_case(make: MakeCase, agent: LocalRuntime, fresh: LocalRuntime) -> Case:
    # A folder on the node stands for /testbed, which both runtimes of a real task have at one path.
    return make(runtime=fresh, agent_runtime=agent)


def patching(agent: LocalRuntime, fresh: LocalRuntime) -> TestOnOutput:
    return evaluator(
        patch_command=f"cd {agent.workdir} && git diff --binary",
        repo_dir=fresh.workdir,
        test_command=TESTS,
        expected_output_json={"test_it": "PASSED"},
    )


def test_a_fresh_runtime_gets_the_patch(case: MakeCase, runtimes: MakeRuntime) -> None:
    """The agent's changes, bytes that are no text included, are applied where the tests then run."""
    agent, fresh = repository(runtimes("agent"), CHANGE), repository(runtimes("fresh"))
    assert patching(agent, fresh).evaluate(fresh_case(case, agent, fresh)).outcome_reward == 1.0
    assert (Path(fresh.workdir) / "file.txt").read_bytes() == b"one\nchanged \xff\nthree\n"
    assert list(Path(fresh.workdir).glob(".polar*")) == []


def test_a_patch_that_git_refuses_is_tried_with_patch(case: MakeCase, runtimes: MakeRuntime) -> None:
    """Context that moved a little stops `git apply` but not `patch --fuzz`."""
    agent = repository(runtimes("agent"), CHANGE)
    fresh = repository(runtimes("fresh"), "printf 'other\\ntwo\\nthree\\n' > file.txt")
    verdict = patching(agent, fresh).evaluate(fresh_case(case, agent, fresh))
    assert verdict.outcome_reward == 1.0
    assert "trying patch" in verdict.evidence["apply_patch_output"]


def test_a_patch_that_cannot_be_applied_is_zero(case: MakeCase, runtimes: MakeRuntime) -> None:
    """The original's rule: 0.0, with what was said kept."""
    agent = repository(runtimes("agent"), CHANGE)
    fresh = repository(runtimes("fresh"), "printf 'nothing alike\\n' > file.txt")
    verdict = patching(agent, fresh).evaluate(fresh_case(case, agent, fresh))
    assert verdict.outcome_reward == 0.0
    assert verdict.evidence["report"]["failed_apply_patch"]
    assert verdict.evidence["apply_patch_output"]


def test_a_fresh_runtime_alone_is_an_error(case: MakeCase) -> None:
    """Where the agent's runtime is gone, its patch is not known to be empty: no verdict, no zero."""
    task = {"task_id": "t", "instruction": "do", "agent": {"harness": "codex"}}
    task |= {"evaluator": {"strategy": "test_on_output", "refresh_runtime": True}}
    with pytest.raises(EvaluatorError) as caught:
        evaluator().evaluate(case(task=parse_task(task)))
    assert caught.value.code == "no_agent_runtime"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"patch_command": "exit 2"}, "no_patch"),
        ({"patch_command": "sleep 60", "apply_timeout": 0.2}, "evaluator_timeout"),
        ({"test_command": "sleep 60", "test_timeout": 0.2}, "evaluator_timeout"),
    ],
)
def test_no_verdict(case: MakeCase, changes: dict[str, Any], code: str) -> None:
    """A patch that cannot be read, or tests that do not end, leave no verdict."""
    with pytest.raises(EvaluatorError) as caught:
        evaluator(**changes).evaluate(case())
    assert caught.value.code == code


def test_sections_that_tests_leave_behind_are_dropped() -> None:
    """Caches go, by default and by the task's globs; everything else stays byte for byte."""
    section = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\x85\n+diff --git a/no b/no.pyc\n"
    kept = [section.format(path).encode("latin-1") for path in ("a.py", "dir with space/b.txt")]
    dropped = [
        section.format(path).encode("latin-1")
        for path in ("x/__pycache__/a.bin", "__pycache__/b", "a.pyc", "d/.pytest_cache/v", "out/report.log")
    ]
    whole = b"Submodule s 1..2:\n" + kept[0] + b"".join(dropped) + kept[1]
    assert without_excluded(whole, ("*.log",)) == b"Submodule s 1..2:\n" + b"".join(kept)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"test_command": " "}, "test_command"),
        ({"expected_output_json": "{"}, "expected_output_json"),
        ({"expected_output_json": "[1]"}, "expected_output_json"),
        ({"expected_output_json": {}}, "expected_output_json"),
        ({"test_timeout": 0}, "test_timeout"),
        ({"repo_dir": ""}, "repo_dir"),
        ({"typo": 1}, "typo"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], field: str) -> None:
    """A wrong setting is refused when the evaluator is made, at its own path."""
    with pytest.raises(SpecError) as caught:
        evaluator(**changes)
    assert caught.value.errors[0][0] == f"evaluator.config.{field}"
