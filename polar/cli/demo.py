"""`polar demo`: the main job, end to end, with nothing to download but the agents themselves.

Starts all of Polar as `polar up` does, submits the examples as any client would, and ends with a table.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from polar.cli.client import Client, console, load_task, watch
from polar.cli.services import secret_file
from polar.dispatch import STAGE_NAMES
from polar.embedded import free_port
from polar.keys import PREFIX
from polar.settings import Settings, child_environ

START_SECONDS = 60.0


@click.command(epilog="Example: polar demo --examples examples")
@click.option(
    "--examples", default="examples", type=click.Path(exists=True, path_type=Path), help="Folder of the examples."
)
@click.option(
    "--home",
    default=".polar/demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for data and logs.",
)
@click.option("--skip-calculator", is_flag=True, help="Leave out mini-swe-agent, which is installed from PyPI.")
def demo(examples: Path, home: Path, skip_calculator: bool) -> None:
    """Run real rollouts on this machine: tool-using agents on a tiny model, and mini-swe-agent on a script."""
    began = time.monotonic()
    ports = {"port": str(free_port()), "proxy-port": str(free_port())}
    tasks = ["tool_lookup/task.yaml", "tool_lookup/anthropic.yaml"] + ["calculator/task.yaml"] * (not skip_calculator)
    script = (examples / "calculator" / "script.json").resolve()
    with RunningPolar(home.resolve(), ports, script) as client:
        console.print(f"Polar is up after {time.monotonic() - began:.1f} s at {client.url}")
        finals = [_run(client, examples / name) for name in tasks]
        rows = [(final, client.call("GET", f"/tasks/{final['task_id']}/sessions")["sessions"]) for final in finals]
    console.print(_table(rows))
    _explain(rows, home, time.monotonic() - began)
    if any(final["status"] != "completed" for final, _ in rows):
        raise SystemExit(1)


class RunningPolar:
    """All of Polar in a child process, as `polar up` starts it."""

    def __init__(self, home: Path, ports: dict[str, str], script: Path) -> None:
        self.home, self.ports = home, ports
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "up.log"
        flags = [part for name, port in ports.items() for part in (f"--{name}", port)]
        self.argv = [sys.executable, "-m", "polar", "up", "--home", str(home), "--script", str(script), *flags]

    def __enter__(self) -> Client:
        key = secret_file(self.home / "api_key", PREFIX)
        with self.log.open("w") as log:
            settings = Settings.load()
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log, env=child_environ(settings))
        client = Client(f"http://127.0.0.1:{self.ports['port']}", key)
        deadline = time.monotonic() + START_SECONDS
        with console.status("starting Polar: Postgres, broker, engines, API, proxy, worker, clock"):
            while not self._ready(client):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    end = self.log.read_text()[-2000:]
                    raise click.ClickException(f"Polar did not start; `polar doctor` says what is missing:\n{end}")
                time.sleep(0.1)
        return client

    def _ready(self, client: Client) -> bool:
        try:
            return bool(client.call("GET", "/readyz"))
        except click.ClickException:
            return False

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _run(client: Client, path: Path) -> dict[str, Any]:
    task = load_task(path)
    task["task_id"] = f"{task['task_id']}-{uuid.uuid4().hex[:6]}"
    client.call("POST", "/rollout/task/submit", json=task)
    return watch(client, task["task_id"])


def _table(tasks: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> Table:
    table = Table("task", "session", "state", "model", "stages, s", "traces", "tokens", "fidelity", "reward")
    for final, rows in tasks:
        results = {result["session_id"]: result for result in final["results"]}
        for row in rows:
            result = results[row["session_id"]]
            traces = result["trajectory"]["traces"]
            spent = " ".join(f"{row['stages'].get(stage, {}).get('run_ms', 0) / 1000:.1f}" for stage in STAGE_NAMES)
            model = result["trajectory"]["metadata"].get("model_used") or "–"
            fidelity = ", ".join(sorted({trace["fidelity"] for trace in traces})) or "–"
            reward = "–" if row["reward"] is None else f"{row['reward']:.1f}"
            numbers = (str(len(traces)), str(row["sampled_tokens"]), fidelity, reward)
            table.add_row(final["task_id"], row["session_id"][4:12], row["state"], model, spent, *numbers)
    return table


def _explain(tasks: list[tuple[dict[str, Any], list[dict[str, Any]]]], home: Path, seconds: float) -> None:
    for final, rows in tasks:
        for row in rows:
            if row["error"]:
                console.print(f"[yellow]{row['session_id']}[/yellow]: {row['error']}", soft_wrap=True)
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else float("nan")
        console.print(f"{final['task_id']}: {final['status']}, mean reward {mean:.2f} over {len(rewards)} sessions")
    console.print(f"stages are {', '.join(STAGE_NAMES)}; answers of polar-scripted are replayed, not sampled")
    console.print(
        f"\n{seconds:.1f} s in all. Everything is kept in {home}: `polar up --home {home}` finds it again.\n"
        "Read on: README.md, docs/lifecycle.md, examples/tool_lookup/README.md",
        soft_wrap=True,
    )
