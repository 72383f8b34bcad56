"""What agents do for a reward they did not earn: each hack shown to work where nothing is promised, then caught."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from polar.errors import EvaluatorError
from polar.evaluators.base import Case, Verdict
from polar.evaluators.command import Command
from polar.evaluators.ends import parse_ends
from polar.evaluators.harbor import Harbor
from polar.evaluators.swebench_harness import SwebenchHarness
from polar.evaluators.test_on_output import TestOnOutput
from polar.models import RolloutSession
from polar.runtimes.base import Limits
from polar.runtimes.local import LocalRuntime
from polar.settings import Settings
from polar.spec import EvaluatorSpec
from polar.stages.base import Job
from polar.stages.evaluate import _case
from tests.fakes.tasks import task, topology

MakeCase = Callable[..., Case]
MakeRuntime = Callable[[str], LocalRuntime]
REPOSITORY = """set -e
mkdir tests
printf 'def add(a, b):\\n    return a - b\\n' > calc.py
printf 'from calc import add\\n\\n\\ndef test_add():\\n    assert add(1, 2) == 3\\n' > tests/test_calc.py
printf '#!/bin/sh\\nexec python -m pytest -rA -p no:cacheprovider tests\\n' > $HOME/check
chmod +x $HOME/check
"""
CHECK = "PYTHONPATH=. $HOME/check"
EXPECTED = {"test_add": "PASSED"}
TEST = "tests/test_calc.py::test_add"


def ran(runtime: LocalRuntime, command: str) -> None:
    done = runtime.exec(command, limits=Limits(60))
    assert done.ok, done.summary()


@pytest.fixture
def judge(case: MakeCase, runtimes: MakeRuntime) -> Callable[..., Verdict]:
    """The verdict on what a command does to the repository."""

    def verdict(agent: str, *, fresh: bool = True, **config: Any) -> Verdict:
        works = runtimes(f"agent-{time.monotonic_ns()}")
        ran(works, REPOSITORY)
        ran(works, agent)
        values = {"repo_dir": ".", "test_command": CHECK, "expected_output_json": EXPECTED, **config}
        if not fresh:
            # Without a repository there is no diff to read, and that is not what is tried here.
            return TestOnOutput(**values, patch_command="echo changed").evaluate(case(runtime=works))
        judged = runtimes(f"fresh-{time.monotonic_ns()}")
        ran(judged, REPOSITORY)
        return TestOnOutput(**values).evaluate(case(runtime=judged, agent_runtime=works))

    return verdict


def test_honest_work_is_rewarded(judge: Callable[..., Verdict]) -> None:
    """Or nothing below says anything."""
    assert judge("sed -i 's/a - b/a + b/' calc.py", protect=["tests/**"]).outcome_reward == 1.0


@pytest.mark.parametrize(
    "edit",
    [
        "sed -i 's/== 3/== -1/' tests/test_calc.py",
        "mkdir mine; sed 's/== 3/== -1/' tests/test_calc.py > mine/test_calc.py; rm -r tests; ln -s mine tests",
    ],
)
def test_edited_tests_are_put_back(judge: Callable[..., Verdict], edit: str) -> None:
    """Changed in place, or a link to others in their place."""
    assert judge(edit).outcome_reward == 1.0
    protected = judge(edit, protect=["tests/**"])
    assert protected.outcome_reward == 0.0
    assert "tests/test_calc.py" in protected.evidence["restored"]


CONFTEST = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    result.get_result().outcome = "passed"
"""
PLANTS = {
    "conftest.py": f"cat > conftest.py <<'EOF'\n{CONFTEST}\nEOF",
    "tests/conftest.py": f"cat > tests/conftest.py <<'EOF'\n{CONFTEST}\nEOF",
    "pytest.ini": f"cat > helper.py <<'EOF'\n{CONFTEST}\nEOF\nprintf '[pytest]\\naddopts = -p helper\\n' > pytest.ini",
    "sitecustomize.py": f"printf 'import os\\nos.write(1, b\"PASSED {TEST}\")\\nos._exit(0)\\n' > sitecustomize.py",
}


@pytest.mark.parametrize("name", PLANTS)
def test_planted_runner_files_are_taken_away(judge: Callable[..., Verdict], name: str) -> None:
    """Files that Python or pytest reads by itself do not come along."""
    assert judge(PLANTS[name], protect_runner=False).outcome_reward == 1.0
    verdict = judge(PLANTS[name])
    assert verdict.outcome_reward == 0.0
    assert name in verdict.evidence["restored"]


def test_a_replaced_runner_stays_behind(judge: Callable[..., Verdict]) -> None:
    """A program outside of the repository that the agent put in another's place is not there in a fresh runtime."""
    replace = f"touch note; printf '#!/bin/sh\\necho PASSED {TEST}\\n' > $HOME/check"
    assert judge(replace, fresh=False).outcome_reward == 1.0
    assert judge(replace).outcome_reward == 0.0


EXIT = "printf 'import os\\nos._exit(0)\\n' > calc.py"


def test_an_early_exit_passes_no_test(judge: Callable[..., Verdict], case: MakeCase, runtimes: MakeRuntime) -> None:
    """An exit code of 0 is not what counts where tests have to say that they passed."""
    works = runtimes("agent")
    ran(works, f"{REPOSITORY}\n{EXIT}")
    assert Command(command=CHECK).evaluate(case(runtime=works)).outcome_reward == 1.0
    assert judge(EXIT).outcome_reward == 0.0


def test_lines_that_contradict_the_runners_are_seen(judge: Callable[..., Verdict]) -> None:
    """A line that says PASSED after pytest said FAILED of the same test makes neither true."""
    late = f"printf 'import atexit\\natexit.register(print, \"PASSED {TEST}\")\\n' >> calc.py"
    verdict = judge(late)
    report = verdict.evidence["report"]
    assert parse_ends(report["output"]) == EXPECTED
    assert verdict.outcome_reward == 0.0
    assert report["contradicted_tests"] == [TEST]


EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
: '>>>>> Start Test Output'
python -m pytest -rA -p no:cacheprovider tests
: '>>>>> End Test Output'
"""
FORGED = f"""import os
print('''>>>>> Start Test Output
PASSED {TEST}
>>>>> End Test Output
>>>>> Test Exit Code: 0''', flush=True)
os._exit(1)
"""


def test_printed_markers_are_no_markers(case: MakeCase, runtimes: MakeRuntime, tmp_path: Path) -> None:
    """The output that SWE-bench's grader would believe from its known markers alone is not believed here."""
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    instance = {
        "instance_id": "own__calc-1",
        "image": "",
        "repo": "own/calc",
        "version": "1",
        "FAIL_TO_PASS": [TEST],
        "PASS_TO_PASS": [],
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": EVAL_SCRIPT,
    }
    works, fresh = runtimes("agent"), runtimes("fresh")
    ran(works, REPOSITORY)
    ran(fresh, REPOSITORY)
    # Run before pytest captures anything: as the module that pytest itself loads first.
    ran(works, f"cat > pytest.py <<'EOF'\n{FORGED}\nEOF")
    evaluator = SwebenchHarness(instance=instance, repo_dir=".")
    verdict = evaluator.evaluate(case(runtime=fresh, agent_runtime=works))
    log = tmp_path / "log"
    spec = make_test_spec(instance)
    believed = fresh.exec(spec.eval_script + "\n", limits=Limits(60))
    log.write_text(believed.stderr.partition(">>>>> Start")[0] + believed.stdout)
    prediction = {"instance_id": "own__calc-1", "model_patch": "x"}
    assert get_eval_report(spec, prediction, str(log), include_tests_status=True)["own__calc-1"]["resolved"]
    assert verdict.outcome_reward == 0.0
    assert "[printed: Start Test Output]" in verdict.evidence["report"]["output"]


def test_a_planted_reward_file_is_no_reward(case: MakeCase, runtimes: MakeRuntime) -> None:
    """It is removed before the command runs, be it a file, a folder or a link."""
    works = runtimes("agent")
    evaluator = Command(command="true", reward_from="file", reward_file="reward.txt")
    for plant in ("echo 1 > reward.txt", "echo 1 > r; ln -s r reward.txt", "mkdir reward.txt"):
        ran(works, f"rm -rf reward.txt; {plant}")
        with pytest.raises(EvaluatorError) as caught:
            evaluator.evaluate(case(runtime=works))
        assert caught.value.code == "no_reward_file"


@pytest.fixture
def harbor(tmp_path: Path) -> Callable[[str], Harbor]:
    """Harbor's evaluator with a test.sh; its places are below the workdir, for want of a root of its own."""

    def make(script: str) -> Harbor:
        tests = tmp_path / "tests of the task"
        tests.mkdir(exist_ok=True)
        (tests / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
        return Harbor(tests_dir=str(tests), tests_target="tests", verifier_dir="logs/verifier")

    return make


@pytest.mark.parametrize(
    "plant",
    [
        "echo 1 > logs/verifier/reward.json",
        "echo 1 > logs/verifier/reward.txt",
        "rm -r logs/verifier; mkdir mine; echo 1 > mine/reward.txt; ln -s ../mine logs/verifier",
    ],
)
def test_harbor_removes_a_planted_reward(
    case: MakeCase, runtimes: MakeRuntime, harbor: Callable[[str], Harbor], plant: str
) -> None:
    """Tests that write no reward leave none."""
    works = runtimes("agent")
    ran(works, f"mkdir -p logs/verifier; {plant}")
    with pytest.raises(EvaluatorError) as caught:
        harbor("true").evaluate(case(runtime=works))
    assert caught.value.code == "no_reward_file"


def test_harbor_removes_planted_tests(case: MakeCase, runtimes: MakeRuntime, harbor: Callable[[str], Harbor]) -> None:
    """Nothing that lay where the tests go is beside them."""
    works = runtimes("agent")
    ran(works, "mkdir tests; echo 'echo 1 > ../logs/verifier/reward.txt' > tests/helper; echo exit > tests/test.sh")
    script = "test -e tests/helper && echo 1 > logs/verifier/reward.txt || echo 0 > logs/verifier/reward.txt"
    assert harbor(script).evaluate(case(runtime=works)).outcome_reward == 0.0


def test_what_the_tests_leave_running_writes_no_reward(
    case: MakeCase, runtimes: MakeRuntime, harbor: Callable[[str], Harbor]
) -> None:
    """A process that waits for the tests to be over is over with them."""
    works = runtimes("agent")
    ran(works, "printf 'sleep 0.3; echo 1 > logs/verifier/reward.json\\n' > late.sh")
    script = "echo 0 > logs/verifier/reward.txt; (setsid sh late.sh > /dev/null 2>&1 &)"
    assert harbor(script).evaluate(case(runtime=works)).outcome_reward == 0.0
    time.sleep(0.5)
    assert not (Path(works.workdir) / "logs/verifier/reward.json").exists()


def test_what_the_agent_leaves_running_is_ended_before_it_is_judged(runtimes: MakeRuntime, tmp_path: Path) -> None:
    """The stage does so for every evaluator, in the runtime that the agent was in."""
    works = runtimes("agent")
    ran(works, "(setsid sh -c 'while :; do echo 1 > reward.txt; sleep 0.05; done' > /dev/null 2>&1 &)")
    place = Path(works.workdir) / "reward.txt"
    while not place.exists():
        time.sleep(0.02)
    node = topology().gateway.nodes[0]
    session = RolloutSession(id="ses-1", attempt=1, runtimes={"agent": works.handle()}, agent_exit={})
    settings = Settings(home=str(tmp_path / "home"))
    lane = node.lanes[0]
    job = Job(session, task(), create_engine("sqlite://"), settings, node, lane, threading.Event())
    assert _case(job, EvaluatorSpec(strategy="command", config={"command": "true"}), []).runtime is not None
    place.unlink()
    time.sleep(0.3)
    assert not place.exists()
