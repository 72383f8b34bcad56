"""`polar up` as a subprocess, and a client that posts tasks: the whole way on real parts."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import openai
import pytest

from polar.embedded import free_port
from polar.runtimes import tree
from tests.e2e.up import EXAMPLES, THREE_CALLS, Up, example, shell, start

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("file", ["task.yaml", "anthropic.yaml"])
def test_tool_lookup_is_sampled_and_exact(up: Up, file: str) -> None:
    """Real agents on two packages: each session is one exact trace with aligned arrays and a reward."""
    status = up.run(example("tool_lookup", file, num_samples=4))
    assert status["status"] == "completed"
    for result in status["results"]:
        (trace,) = result["trajectory"]["traces"]
        assert trace["fidelity"] == "exact"
        assert len(trace["response_ids"]) == len(trace["loss_mask"]) == len(trace["response_logprobs"])
        assert {0, 1} == set(trace["loss_mask"])
        assert all(lp < 0 for lp, mask in zip(trace["response_logprobs"], trace["loss_mask"], strict=True) if mask)
        assert trace["reward"] in (0.0, 0.2, 1.0)
        stats = result["trajectory"]["metadata"]["reconstruction_stats"]
        assert stats["completions_total"] == stats["completions_merged"] >= 2


def test_count_stars_keeps_the_pictures(up: Up) -> None:
    """Real pictures go through: kept once each, referred to by the trace, and marked as unseen by a text model."""
    status = up.run(example("count_stars", num_samples=2))
    assert status["status"] == "completed"
    for result in status["results"]:
        (trace,) = result["trajectory"]["traces"]
        assert trace["fidelity"] == "exact"
        (picture,) = [part for part in trace["prompt_messages"][0]["content"] if part["type"] == "image_url"]
        digest = picture["image_url"]["url"].removeprefix("polar-media:")
        data = up.http.get(f"/rollout/media/{digest}").content
        assert data.startswith(b"\x89PNG")
        assert hashlib.sha256(data).hexdigest() == digest
        (line,) = trace["metadata"]["completion_metadata"]
        assert line["marks"] == ["images_unseen"]


def test_mini_swe_agent_repairs_the_calculator(up: Up) -> None:
    """The unmodified program from PyPI, answered by the script, makes the tests pass: reward 1.0."""
    status = up.run(example("calculator"))
    (result,) = status["results"]
    assert (status["status"], result["status"]) == ("completed", "COMPLETED"), result["error"]
    assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [1.0]
    assert result["trajectory"]["metadata"]["model_used"] == "polar-scripted"


def test_a_harness_that_calls_no_model_fails_and_says_so(up: Up) -> None:
    """A clean exit without a model call is a failure of the harness."""
    (result,) = up.run(shell("true"))["results"]
    assert (
        result["status"],
        result["metadata"]["error"]["blame"],
        result["metadata"]["error"]["code"],
    ) == ("ERROR", "harness", "no_model_calls")


def test_an_agents_exit_code_is_believed(up: Up) -> None:
    """An agent that fails after its calls still gets a trajectory, and its session says ERROR."""
    (result,) = up.run(shell(THREE_CALLS % "pass" + "\nexit 3"))["results"]
    assert (result["status"], result["trajectory"]["metadata"]["agent_result"]["exit_code"]) == ("ERROR", 3)
    assert result["trajectory"]["traces"]


def test_an_agent_out_of_time_keeps_its_trajectory(up: Up) -> None:
    """The agent's own budget ends the agent, not the session: TIMEOUT with traces."""
    command = THREE_CALLS % "import time; time.sleep(60) if turn == 1 else None"
    (result,) = up.run(shell(command, agent_timeout_seconds=4))["results"]
    assert (result["status"], result["metadata"]["state"]) == ("TIMEOUT", "completed")
    assert result["metadata"]["turns"] == 2
    assert result["trajectory"]["traces"]


def test_cancelling_stops_the_agent(up: Up) -> None:
    """Cancel ends a running session, and nothing of its agent is left."""
    marker = f"sleep-{uuid.uuid4().hex}"
    task_id = up.submit(shell(f"exec -a {marker} sleep 120"))
    pattern = ["pgrep", "-f", marker]
    end = time.monotonic() + 20
    while subprocess.run(pattern, capture_output=True).returncode and time.monotonic() < end:
        time.sleep(0.2)
    assert up.http.delete(f"/rollout/task/{task_id}").json()["status"] == "cancelled"
    while not subprocess.run(pattern, capture_output=True).returncode and time.monotonic() < end + 20:
        time.sleep(0.2)
    assert subprocess.run(pattern, capture_output=True).returncode == 1


def test_an_agent_that_gives_up_on_a_dead_proxy_is_run_again(up: Up) -> None:
    """One that asks only once, and fails because its proxy was killed, has not failed: it runs again."""
    name = uuid.uuid4().hex
    task_id = up.submit(shell(THREE_CALLS % f"import time; open('/tmp/{name}', 'w').close(); time.sleep(0.3)"))
    marker, end = Path(f"/tmp/{name}"), time.monotonic() + 40
    while not marker.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    (proxy,) = (
        pid
        for pid, found in tree.processes().items()
        if found.parent == up.process.pid and b"workers.proxy:app" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(proxy, signal.SIGKILL)
    (result,) = up.wait(task_id)["results"]
    marker.unlink()
    assert result["status"] == "COMPLETED", result["metadata"]
    events = up.http.get(f"/rollout/session/{result['session_id']}/events").json()["events"]
    retries = [event["note"] for event in events if event["move"] == "retry"]
    assert [(note["stage"], note["blame"], note["code"]) for note in retries] == [("execute", "node", "proxy_lost")]
    assert "the agent failed on it" in retries[0]["message"]
    assert result["trajectory"]["metadata"]["record_count"] == 3


def test_the_command_line_submits_and_watches(up: Up, tmp_path: Path) -> None:
    """`polar submit` exits 0 only if the task completed."""
    env = {**os.environ, "POLAR_HOME": str(up.home), "POLAR_URL": f"http://127.0.0.1:{up.port}"}
    name = f"cli-{uuid.uuid4().hex[:6]}"
    good = str(EXAMPLES / "tool_lookup/task.yaml")
    argv = [sys.executable, "-m", "polar", "submit", good, "--task-id", name, "--num-samples", "1"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "completed" in done.stdout) == (0, True), done.stdout + done.stderr
    again = subprocess.run([*argv[:-4], "--task-id", "bad name"], env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1 and "task_id" in again.stderr and "Traceback" not in again.stderr


def test_a_harness_that_runs_elsewhere_is_recorded(up: Up) -> None:
    """A session without an agent: a key for whoever asks, and on closing a trajectory like any other's."""
    opened = up.http.post("/sessions", json={"evaluator": {"strategy": "session_completed"}}).raise_for_status().json()
    with openai.OpenAI(base_url=opened["base_urls"]["openai"], api_key=opened["api_key"]) as client:
        for _ in range(2):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=8)
    where = f"/sessions/{opened['session_id']}"
    assert (up.http.get(where).json()["completion_count"], opened["status"]) == (2, "RUNNING")
    up.http.post(f"{where}/close").raise_for_status()
    status = up.wait(opened["task_id"])
    trajectory = status["results"][0]["trajectory"]
    assert (status["status"], trajectory["status"], len(trajectory["traces"])) == ("completed", "COMPLETED", 2)
    assert [trace["reward"] for trace in trajectory["traces"]] == [1.0, 1.0]
    assert up.http.post(f"{where}/close").json()["status"] == "COMPLETED"
    late = openai.OpenAI(base_url=opened["base_urls"]["openai"], api_key=opened["api_key"])
    with late, pytest.raises(openai.AuthenticationError):
        late.models.list()


def test_started_again_it_carries_on(tmp_path: Path) -> None:
    """Stopped in the middle of a session by Ctrl-C, a new `polar up` in the same folder finishes the task."""
    home, ports = tmp_path / "home", (free_port(), free_port())
    first = start(home, *ports)
    task_id = first.submit(shell(THREE_CALLS % "import time; time.sleep(2)"))
    end = time.monotonic() + 30
    while first.http.get(f"/tasks/{task_id}/sessions").json()["sessions"][0]["stage"] != "execute":
        assert time.monotonic() < end
        time.sleep(0.2)
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(40) == 0
    second = start(home, *ports)
    try:
        status = second.wait(task_id)
        assert status["status"] == "completed"
        assert status["results"][0]["trajectory"]["metadata"]["record_count"] == 3
    finally:
        second.process.send_signal(signal.SIGINT)
        second.process.wait(40)
