"""The trainer's round through `polar up`: pause, push, name the version, resume; and what comes too late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.e2e.up import THREE_CALLS, Up, shell

pytestmark = pytest.mark.e2e


def polar(up: Up, *arguments: str) -> Any:
    """What a command prints with --json."""
    own = {"POLAR_URL": f"http://127.0.0.1:{up.port}", "POLAR_API_KEY": (up.home / "api_key").read_text().strip()}
    argv = [sys.executable, "-m", "polar", *arguments, "--json"]
    done = subprocess.run(argv, env={**os.environ, **own}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until_turn(up: Up, task_id: str, turns: int) -> None:
    """Wait until the task's session has made so many calls."""
    end = time.monotonic() + 60
    while up.http.get(f"/tasks/{task_id}/sessions").json()["sessions"][0]["turns"] < turns:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_round_of_training(up: Up) -> None:
    """Nothing is sampled while paused, and everything after carries the version that was set meanwhile."""
    assert polar(up, "pause", "--wait", "20")["holds"]
    task_id = up.submit(shell(THREE_CALLS % "pass"))
    end = time.monotonic() + 60
    while sum(each["held"] for each in polar(up, "policy")["proxies"]) < 1:
        assert time.monotonic() < end
        time.sleep(0.1)
    found = polar(up, "policy", "--name", "scripted", "--version", "3", "--max-staleness", "0")
    assert (found["name"], found["version"], found["max_staleness"], found["gate"]) == ("scripted", 3, 0, "drain")
    assert polar(up, "resume")["calls"] == {"drained": 0, "aborted": 0, "held": 1, "in_flight": 0}
    status = up.wait(task_id)
    assert status["status"] == "completed"
    (trace,) = status["results"][0]["trajectory"]["traces"]
    certificate = trace["metadata"]["certificate"]
    assert {span["version"] for span in certificate["policy_versions"]} == {3}
    assert certificate["staleness"]["behind"] == 0
    assert trace["trainable"] and trace["fidelity"] == "exact"


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_a_pause_costs_an_agent_no_time(up: Up, mode: str) -> None:
    """A pause longer than all the time that the agent and its session have: both go on where they were, and complete.

    The agent waits on its own end of the line; it is not told, and need not know."""
    seconds = 10
    ask = THREE_CALLS % "import time; time.sleep(1)"
    task_id = up.submit(shell(ask, agent_timeout_seconds=seconds, timeout_seconds=seconds + 5))
    until_turn(up, task_id, 1)
    held = up.http.post("/rollout/pause", params={"mode": mode, "wait": 20}).json()
    assert held["holds"], held
    (before,) = up.http.get(f"/tasks/{task_id}/sessions").json()["sessions"]
    time.sleep(seconds + 6)
    (after,) = up.http.get(f"/tasks/{task_id}/sessions").json()["sessions"]
    assert (after["stage"], after["state"], after["turns"]) == ("execute", "running", before["turns"])
    up.http.post("/rollout/resume").raise_for_status()
    (result,) = up.wait(task_id)["results"]
    assert result["status"] == "COMPLETED", result["metadata"]
    metadata = result["trajectory"]["metadata"]
    assert (metadata["agent_result"]["exit_code"], metadata["record_count"]) == (0, 3)
    moves = [each["move"] for each in up.http.get(f"/rollout/session/{result['session_id']}/events").json()["events"]]
    assert "retry" not in moves and "time_out" not in moves


def test_a_session_that_comes_too_late(up: Up) -> None:
    """A trace whose oldest token is further behind than its task allows does not train, and says so."""
    polar(up, "policy", "--version", "5", "--max-staleness", "0")
    for version, bound, trains in ((6, None, False), (7, 1, True)):
        more = {} if bound is None else {"max_staleness": bound}
        task_id = up.submit(shell(THREE_CALLS % "import time; time.sleep(1)", **more))
        until_turn(up, task_id, 1)
        up.http.put("/rollout/policy", json={"version": version}).raise_for_status()
        (trace,) = up.wait(task_id)["results"][0]["trajectory"]["traces"]
        certificate = trace["metadata"]["certificate"]
        assert certificate["staleness"]["oldest"] == version - 1
        assert certificate["staleness"]["behind"] == 1
        assert (trace["trainable"], "stale" in certificate["flags"]) == (trains, not trains)
        assert "mixed_policy_versions" in certificate["flags"]


def test_a_task_names_its_bound_wrongly(up: Up) -> None:
    """A bound below zero is refused by name."""
    answer = up.http.post("/rollout/task/submit", json=shell("true", max_staleness=-1))
    assert [error["field"] for error in answer.json()["errors"]] == ["max_staleness"]


def test_people_read_sentences(up: Up) -> None:
    """Without --json the command says what there is in words."""
    own = {"POLAR_URL": f"http://127.0.0.1:{up.port}", "POLAR_API_KEY": (up.home / "api_key").read_text().strip()}
    argv = [sys.executable, "-m", "polar", "pause", "--mode", "abort"]
    shown = subprocess.check_output(argv, env={**os.environ, **own}, text=True, timeout=60)
    assert "gate abort" in shown and "0 drained, 0 aborted, 0 held, 0 in flight" in shown
    assert polar(up, "resume")["gate"] == "open"
