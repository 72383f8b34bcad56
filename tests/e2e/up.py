"""A `polar up` of the tests' own, and the tasks they send to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from polar.cli.client import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
THREE_CALLS = """python - <<'PY'
import json, os, urllib.request
messages = [{"role": "user", "content": "count"}]
for turn in range(3):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 32}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": f"again {turn}"}]
    %s
PY"""


@dataclass
class Up:
    """A running `polar up`."""

    home: Path
    port: int
    process: subprocess.Popen[bytes]
    http: httpx.Client

    def submit(self, body: dict[str, Any]) -> str:
        self.http.post("/rollout/task/submit", json=body).raise_for_status()
        return str(body["task_id"])

    def wait(self, task_id: str, seconds: float = 120) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status: dict[str, Any] = self.http.get(f"/rollout/task/{task_id}", params={"wait": 5}).json()
            if status["status"] != "running":
                return status
        raise AssertionError(self.http.get(f"/tasks/{task_id}/sessions").text)

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.wait(self.submit(body))


def start(
    home: Path, port: int, proxy_port: int, script: Path = EXAMPLES / "calculator/script.json", **more: str
) -> Up:
    """Start it, with `more` variables, and wait until a lane is alive."""
    flags = ["--home", str(home), "--port", str(port), "--proxy-port", str(proxy_port), "--script", str(script)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")} | more
    with (home.parent / "up.log").open("ab") as log:
        argv = [sys.executable, "-m", "polar", "up", *flags]
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=home.parent)
    end = time.monotonic() + 90
    while time.monotonic() < end:
        assert process.poll() is None, (home.parent / "up.log").read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).is_success:
                break
        except httpx.TransportError:
            time.sleep(0.2)
    key = (home / "api_key").read_text()
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": key}, timeout=30)
    return Up(home, port, process, http)


def example(name: str, file: str = "task.yaml", **changes: Any) -> dict[str, Any]:
    return {**load_task(EXAMPLES / name / file), "task_id": f"{name}-{uuid.uuid4().hex[:6]}", **changes}


def shell(command: str, **changes: Any) -> dict[str, Any]:
    body = {
        "task_id": f"shell-{uuid.uuid4().hex[:6]}",
        "instruction": "count",
        "agent": {"harness": "shell", "custom_shell": {"command": command}},
        "runtime": {"backend": "local"},
        "builder": {"strategy": "prefix_merging"},
        "lanes": ["scripted"],
    }
    return {**body, **changes}
