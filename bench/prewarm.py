"""Wall time of sessions that each need 5 s of preparation: prewarm off, overlapping, and prepared once.

    python -m bench.prewarm [--sessions 64] [--prepare 5] [--agent 2] [--runtime bubblewrap]

The steps sleep, and so do the agents between their model calls, so that the figures are of waiting and not of this
machine's processors. `off`: a lane without ready_buffer, where a session is prepared in its agent's place.
`overlap`: as many are prepared ahead as agents run. `ahead`: three times as many, which is what preparation takes here.
`once`: as many as agents run, with prepare_once. Ideal: agents alone, with their places never empty.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from bench.measure import server, tree_cpu
from bench.sessions import AGENT
from polar.cli.demo import RunningPolar
from polar.embedded import free_port

PLACES = 8
MODES = {"off": (0, False), "overlap": (PLACES, False), "ahead": (3 * PLACES, False), "once": (PLACES, True)}
"""Per mode: ready_buffer of the lane, and prepare_once of the task."""


def run(mode: str, asked: argparse.Namespace, engine_url: str, script: Path) -> tuple[float, float, int]:
    """Seconds from submit to the end, CPU seconds of it all, and how many sessions completed."""
    buffer, once = MODES[mode]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        ports = {"port": str(free_port()), "proxy-port": str(free_port())}
        lane = {"name": "gpu0", "max_execute": PLACES, "ready_buffer": buffer, "engine": {"base_url": engine_url}}
        node = {"id": "local", "host": "127.0.0.1", "port": int(ports["proxy-port"]), "lanes": [lane]}
        topology = {"rollout": {"host": "127.0.0.1", "port": int(ports["port"])}, "gateway": {"nodes": [node]}}
        (home / "topology.yaml").write_text(yaml.safe_dump(topology))
        (home / "agent.py").write_text(AGENT + f"\nimport time; time.sleep({asked.agent})\n")
        os.environ |= {"POLAR_TOPOLOGY": str(home / "topology.yaml"), "POLAR_WORKER_THREADS": str(6 * PLACES)}
        up = RunningPolar(home / "home", ports, script)
        with up as client:
            time.sleep(2.0)
            cpu, begun = tree_cpu(up.process.pid), time.monotonic()
            client.call("POST", "/rollout/task/submit", json=task(asked, home, once=once))
            while (
                client.call("GET", "/rollout/task/load", params={"view": "summary", "wait": 30})["status"] == "running"
            ):
                pass
            seconds = time.monotonic() - begun
            rows = client.call("GET", "/tasks/load/sessions")["sessions"]
            cpu = tree_cpu(up.process.pid) - cpu
    return seconds, cpu, sum(row["state"] == "completed" for row in rows)


def task(asked: argparse.Namespace, home: Path, *, once: bool) -> dict[str, Any]:
    """The sessions, as one task."""
    steps = [
        {"type": "upload_file", "source": str(home / "agent.py"), "target": "agent.py"},
        {"type": "exec", "command": f"sleep {asked.prepare}; echo done >prepared"},
    ]
    image = {"image": asked.image} if asked.image else {}
    return {
        "task_id": "load",
        "instruction": "count",
        "num_samples": asked.sessions,
        "agent": {"harness": "shell", "custom_shell": {"command": "test -e prepared && python3 -S -E agent.py"}},
        "runtime": {"backend": asked.runtime, "prepare": steps, "prepare_once": once, **image},
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {"strategy": "session_completed"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--prepare", type=float, default=5.0, help="Seconds of a session's preparation.")
    parser.add_argument("--agent", type=float, default=2.0, help="Seconds that an agent does nothing.")
    parser.add_argument("--runtime", default="bubblewrap")
    parser.add_argument("--image")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    asked = parser.parse_args()
    ideal = asked.agent * asked.sessions / PLACES
    table = Table("prewarm", "wall time", "against the ideal", "CPU of it all", "completed")
    table.add_row("ideal: agents alone", f"{ideal:.1f} s", "1.0", "", "")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"scripts": [{"answers": [{"content": "one"}, {"content": "two"}]}]}))
        port = free_port()
        argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port)]
        with server(argv, f"http://127.0.0.1:{port}/model_info"):
            for mode in asked.modes:
                seconds, cpu, done = run(mode, asked, f"http://127.0.0.1:{port}", script)
                share = f"{seconds / ideal:.1f}"
                table.add_row(mode, f"{seconds:.1f} s", share, f"{cpu:.1f} s", f"{done} of {asked.sessions}")
    Console().print(table)


if __name__ == "__main__":
    main()
