"""Whole rollouts per second: trivial sessions (shell harness, 3 model calls each, scripted engine without latency).

    python -m bench.sessions [--sessions 200]

Starts its own Polar in a temporary folder and prints one table: sessions/s, time from submit to the first
model call, p50/p99 of each stage's waiting and work, and the idle CPU of the whole system before the load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import tree_cpu
from polar.cli.client import Client
from polar.cli.demo import RunningPolar
from polar.dispatch import STAGE_NAMES
from polar.embedded import free_port

AGENT = """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["INSTRUCTION"]}]
for turn in range(3):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 32}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": f"again {turn}"}]
"""
IDLE_SECONDS = 10.0


def run(sessions: int) -> dict[str, Any]:
    """One measurement on a fresh Polar."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        script = home / "script.json"
        script.write_text(json.dumps({"scripts": [{"answers": [{"content": "one"}, {"content": "two"}]}]}))
        (home / "agent.py").write_text(AGENT)
        up = RunningPolar(home / "home", {"port": str(free_port()), "proxy-port": str(free_port())}, script)
        with up as client:
            time.sleep(2.0)
            before = tree_cpu(up.process.pid)
            time.sleep(IDLE_SECONDS)
            idle = (tree_cpu(up.process.pid) - before) / IDLE_SECONDS
            first = _first_call(client, home)
            begun, cpu = time.monotonic(), tree_cpu(up.process.pid)
            client.call("POST", "/rollout/task/submit", json=task("load", home, sessions))
            while (
                client.call("GET", "/rollout/task/load", params={"view": "summary", "wait": 30})["status"] == "running"
            ):
                pass
            seconds = time.monotonic() - begun
            rows = client.call("GET", "/tasks/load/sessions")["sessions"]
            return {
                "rows": rows,
                "seconds": seconds,
                "first": first,
                "idle": idle,
                "cpu": tree_cpu(up.process.pid) - cpu,
            }


def task(name: str, home: Path, sessions: int) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": "count",
        "num_samples": sessions,
        "agent": {"harness": "shell", "custom_shell": {"command": f"python -S -E {home / 'agent.py'}"}},
        "runtime": {"backend": "local"},
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {"strategy": "session_completed"},
        "lanes": ["scripted"],
    }


def _first_call(client: Client, home: Path) -> list[float]:
    """Seconds from before the submit to the first model call, a few times on an idle system."""
    found = []
    for number in range(5):
        name = f"first-{number}"
        submitted = time.time()
        client.call("POST", "/rollout/task/submit", json=task(name, home, 1))
        client.call("GET", f"/rollout/task/{name}", params={"wait": 30, "view": "summary"})
        (session,) = client.call("GET", f"/tasks/{name}/sessions")["sessions"]
        calls = client.call("GET", f"/rollout/session/{session['session_id']}/completions")["completions"]
        found.append(calls[0]["requested_at"] - submitted)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=200)
    arguments = parser.parse_args()
    result = run(arguments.sessions)
    rows = result["rows"]
    done = sum(row["state"] == "completed" for row in rows)
    table = Table("figure", "value")
    table.add_row("sessions completed", f"{done} of {len(rows)}")
    table.add_row("sessions per second", f"{done / result['seconds']:.1f}")
    table.add_row("CPU of Polar per session", f"{1000 * result['cpu'] / len(rows):.0f} ms, agents and engine included")
    table.add_row("submit to first model call", f"{1000 * statistics.median(result['first']):.0f} ms (median of 5)")
    table.add_row("idle CPU of the whole system", f"{100 * result['idle']:.1f} % of one core")
    for stage in STAGE_NAMES:
        work = sorted(row["stages"].get(stage, {}).get("run_ms", 0) for row in rows)
        table.add_row(f"{stage}, ms of work p50 / p99", f"{work[len(work) // 2]} / {work[int(len(work) * 0.99)]}")
    Console().print(table)


if __name__ == "__main__":
    main()
