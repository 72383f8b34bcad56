"""The examples of evaluators and of classes of one's own, each run by the command that its page names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar.embedded import free_port
from polar.runtimes.bubblewrap import BubblewrapRuntime
from tests.e2e.up import EXAMPLES, Up, start

pytestmark = pytest.mark.e2e
SCRIPTED = ("swebench_verified", "harbor_task")
needs_bubblewrap = pytest.mark.skipif(
    BubblewrapRuntime.unavailable() is not None, reason="bubblewrap does not run here"
)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One `polar up` with the scripts of all scripted examples, and with the examples' own classes to import."""
    folder = tmp_path_factory.mktemp("examples")
    scripts = [
        each for name in SCRIPTED for each in json.loads((EXAMPLES / name / "script.json").read_text())["scripts"]
    ]
    (folder / "script.json").write_text(json.dumps({"scripts": scripts}))
    path = os.pathsep.join(str(EXAMPLES / name) for name in ("own_harness", "own_evaluator"))
    running = start(folder / "home", free_port(), free_port(), folder / "script.json", PYTHONPATH=path)
    yield running
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(40) == 0


def run(up: Up, *argv: str) -> subprocess.CompletedProcess[str]:
    """A command of a page, as a user runs it."""
    env = {**os.environ, "POLAR_HOME": str(up.home), "POLAR_URL": f"http://127.0.0.1:{up.port}"}
    return subprocess.run(
        [sys.executable, *argv], env=env, capture_output=True, text=True, timeout=300, cwd=EXAMPLES.parent
    )


def submit(up: Up, name: str) -> dict[str, Any]:
    """The example's command; its task as it ended."""
    task_id = f"{name}-{uuid.uuid4().hex[:6]}"
    done = run(up, "-m", "polar", "submit", f"examples/{name}/task.yaml", "--task-id", task_id)
    status: dict[str, Any] = up.http.get(f"/rollout/task/{task_id}").json()
    assert done.returncode == 0, (done.stdout, done.stderr, status)
    return status


def evaluation(up: Up, result: dict[str, Any]) -> dict[str, Any]:
    """A session's verdict, as the API shows it."""
    found: dict[str, Any] = up.http.get(f"/rollout/session/{result['session_id']}").json()
    return found["evaluation"]


@needs_bubblewrap
def test_swebench_verified(up: Up) -> None:
    """The three instances: two mended ones get 1.0, the one that was cheated on 0.0, by SWE-bench's own report."""
    suffix = f"-{uuid.uuid4().hex[:6]}"
    done = run(up, "examples/swebench_verified/submit.py", f"--suffix={suffix}")
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = {}
    for name in ("textkit-1", "ledger-2", "calendars-3"):
        (result,) = up.http.get(f"/rollout/task/swebench-example-{name}{suffix}").json()["results"]
        verdict = evaluation(up, result)
        rewards[name] = verdict["outcome_reward"]
        assert verdict["evidence"]["patch"].startswith("diff --git ")
        report = verdict["evidence"]["report"]
        assert report["instance_id"].endswith(name) and "Start Test Output" in report["output"]
        assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [verdict["outcome_reward"]]
    assert rewards == {"textkit-1": 1.0, "ledger-2": 1.0, "calendars-3": 0.0}


@needs_bubblewrap
def test_swebench_verified_alone(up: Up) -> None:
    """task.yaml is the first of them, and its instance is loaded from the file beside it."""
    (result,) = submit(up, "swebench_verified")["results"]
    assert evaluation(up, result)["outcome_reward"] == 1.0


@needs_bubblewrap
def test_harbor_task(up: Up) -> None:
    """The tests' own reward, in a fresh sandbox into which the artifacts of task.toml were carried."""
    (result,) = submit(up, "harbor_task")["results"]
    verdict = evaluation(up, result)
    assert verdict["outcome_reward"] == 1.0, verdict
    assert verdict["evidence"]["carried"] == ["/app"] and "4 cases are right" in verdict["evidence"]["stdout"]


def test_own_harness(up: Up) -> None:
    """A class by its path: three sampled turns in one exact trace."""
    for result in submit(up, "own_harness")["results"]:
        (trace,) = result["trajectory"]["traces"]
        assert (trace["fidelity"], trace["reward"]) == ("exact", 1.0)
        assert result["metadata"]["turns"] == 3


def test_own_evaluator(up: Up) -> None:
    """A class by its path: a reward for each trace, and the evidence it gave."""
    for result in submit(up, "own_evaluator")["results"]:
        words = evaluation(up, result)["evidence"]["words"]
        rewards = [trace["reward"] for trace in result["trajectory"]["traces"]]
        assert len(words) == 2 and rewards == pytest.approx([max(0.0, 1 - number / 20) for number in words])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"agent": {"import_path": "own_harness:OwnHarness", "settings": {"trns": 3}}}, "agent.settings.trns"),
        ({"evaluator": {"strategy": "own_evaluator:Brevity", "config": {"mots": 2}}}, "evaluator.config"),
        ({"evaluator": {"strategy": "own_evaluator:Nonesuch"}}, "evaluator.strategy"),
    ],
)
def test_a_wrong_setting_is_refused_at_submit(up: Up, changes: dict[str, Any], field: str) -> None:
    """As the pages of the two examples say."""
    body = {"task_id": uuid.uuid4().hex, "instruction": "x", "runtime": {"backend": "local"}}
    body |= {"agent": {"harness": "shell", "custom_shell": {"command": "true"}}, **changes}
    refused: httpx.Response = up.http.post("/rollout/task/submit", json=body)
    assert refused.status_code == 422 and refused.json()["errors"][0]["field"] == field, refused.text


def test_each_page_names_its_commands() -> None:
    """And every file that a page sends the reader to is there."""
    import re

    for page in EXAMPLES.glob("*/README.md"):
        text = page.read_text()
        assert "```sh" in text, page
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), (page, link)
        assert len(text.splitlines()) < 60, page
    assert Path(EXAMPLES / "swebench_verified/instances.jsonl").read_text().count("\n") == 3
