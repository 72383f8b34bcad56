"""One Postgres, one broker and one API on an address; nodes on addresses of their own; and tasks for all of them.

How the network is made is `network.py`'s affair; what must hold, the tests'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from sqlalchemy import func, select
from sqlalchemy.orm import Session

import migrations
from polar.db import connect
from polar.embedded import EmbeddedBroker, EmbeddedPostgres, free_port
from polar.models import RolloutSession, SessionEvent, Task
from tests.chaos.agent import TURNS
from tests.chaos.scene import AGENT, until
from tests.nodes.network import Network

T = TypeVar("T")
FAST, SLOW = 0.6, 1.8
"""Seconds for a model call, of the engines behind the lanes."""
ENGINES = {"a": FAST, "b": SLOW, "c": FAST}
MAX_EXECUTE = 3
START_SECONDS = 180.0


class Scene:
    """All of it; nodes are started one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, folder / "seen"
        self.seen.mkdir()
        self.network = Network()
        self.network.open()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        center = self.network.center
        self.postgres = EmbeddedPostgres(folder / "postgres", host=center)
        self.broker = EmbeddedBroker(folder / "broker", host=center)
        self.port = free_port()
        self.topology = folder / "topology.yaml"

    def start(self, *nodes: str) -> None:
        """The servers, the engines, the API and these nodes, all at once, because most of a start is importing."""
        self.postgres.start()
        self.broker.start()
        migrations.upgrade(self.postgres.url)
        self.database = connect(self.postgres.url, pool_size=2)
        engines = {seconds: self._engine(seconds) for seconds in sorted(set(ENGINES.values()))}
        found = []
        for name, seconds in ENGINES.items():
            self.network.add(name)
            found.append(
                {
                    "id": name,
                    "host": self.network.address(name),
                    "port": 8100,
                    "lanes": [
                        {
                            "name": f"{name}.gpu0",
                            "engine": {"base_url": engines[seconds]},
                            "max_execute": MAX_EXECUTE,
                            "ready_buffer": 1,
                        }
                    ],
                    "default_runtime": {"backend": "local"},
                }
            )
        rollout = {"host": self.network.center, "port": self.port}
        self.topology.write_text(yaml.safe_dump({"rollout": rollout, "gateway": {"nodes": found}}))
        self._launch("center", "serve_rollout", "-c", str(self.topology))
        for name in nodes:
            self.launch_node(name)
        url = f"http://{self.network.center}:{self.port}"
        until(lambda: httpx.get(f"{url}/healthz", timeout=2).is_success, START_SECONDS, lambda: self.log("center"))
        key = (self.folder / "center" / "api_key").read_text()
        self.http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=20)
        for name in nodes:
            self.wait_for_node(name)

    def _engine(self, seconds: float) -> str:
        script = self.folder / f"script-{seconds}.json"
        answers = [{"content": f"That is number {n}."} for n in range(TURNS)]
        script.write_text(json.dumps({"scripts": [{"latency_seconds": seconds, "answers": answers}]}))
        port = free_port()
        where = ("--host", self.network.center, "--port", str(port))
        self._launch(f"engine-{seconds}", "serve_engine", "--script", str(script), *where)
        return f"http://{self.network.center}:{port}"

    def _launch(self, name: str, *words: str, prefix: tuple[str, ...] = ()) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("POLAR_")}
        env |= {"POLAR_DATABASE_URL": self.postgres.url, "POLAR_BROKER_URL": self.broker.url}
        env["POLAR_HOME"] = str(self.folder / name)
        with (self.folder / f"{name}.log").open("ab") as log:
            argv = [*prefix, sys.executable, "-m", "polar", *words]
            self._processes[name] = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=self.folder)

    def launch_node(self, name: str) -> None:
        """Start a node's services, at its own address."""
        words = ("serve_gateway", "-c", str(self.topology), "--node-id", name)
        self._launch(name, *words, prefix=self.network.inside(name))

    def wait_for_node(self, name: str) -> None:
        """Until its lane takes sessions."""
        until(lambda: self.lane(name) == "pulling", START_SECONDS, lambda: self.log(name))

    def log(self, name: str) -> str:
        """The end of what a service said."""
        found = [self.folder / f"{name}.log", *sorted((self.folder / name / "logs").glob("*.log"))]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in found if path.exists())

    def stop(self) -> dict[str, int]:
        """Everything, nodes first; how each service of Polar ended."""
        order = sorted(self._processes, key=lambda name: name not in ENGINES)
        for name in order:
            self._processes[name].terminate()
        codes = {name: self._processes[name].wait(60) for name in order}
        self.database.dispose()
        self.broker.stop()
        self.postgres.stop()
        self.network.close()
        return {name: code for name, code in codes.items() if not name.startswith("engine")}

    # ── what is there ──────────────────────────────────────────────────────────────────────────

    def lane(self, name: str) -> str:
        """What the API says that a node's lane does; empty while it is unknown."""
        answer = self.http.get(f"/nodes/{name}")
        return str(answer.json()["lanes"][0]["state"]) if answer.is_success else ""

    def submit(self, samples: int, **changes: Any) -> str:
        """Post one task; its name."""
        name = f"nodes-{uuid.uuid4().hex[:8]}"
        command = f'echo "$OPENAI_BASE_URL" > "$CHAOS_SEEN/$SESSION_ID.url"; exec {sys.executable} {AGENT}'
        body = {
            "task_id": name,
            "instruction": f"Count for {name}.",
            "num_samples": samples,
            "timeout_seconds": 240,
            "agent": {"harness": "shell", "custom_shell": {"command": command}},
            "runtime": {"backend": "local", "env": {"CHAOS_SEEN": str(self.seen)}},
            "builder": {"strategy": "prefix_merging"},
            "evaluator": {"strategy": "session_completed"},
            **changes,
        }
        self.http.post("/rollout/task/submit", json=body).raise_for_status()
        return name

    def sessions(self, name: str) -> list[RolloutSession]:
        """A task's sessions as they are now."""
        query = select(RolloutSession).join(Task).where(Task.task_id == name).order_by(RolloutSession.number)
        return self.read(lambda db: list(db.scalars(query)))

    def wait(self, name: str, seconds: float = 90.0) -> list[RolloutSession]:
        """The same, once all have ended."""
        query = select(func.count()).select_from(RolloutSession).join(Task).where(Task.task_id == name)
        left = query.where(RolloutSession.ended_at.is_(None))
        why = lambda: "\n".join(str((s.id, s.lane, s.stage, s.state, s.attempt)) for s in self.sessions(name))  # noqa: E731
        until(lambda: self.read(lambda db: db.scalar(left)) == 0, seconds, why, pause=0.2)
        return self.sessions(name)

    def events(self, session_id: str) -> list[SessionEvent]:
        """A session's story."""
        query = select(SessionEvent).where(SessionEvent.session_id == session_id).order_by(SessionEvent.id)
        return self.read(lambda db: list(db.scalars(query)))

    def read(self, ask: Callable[[Session], T]) -> T:
        """Ask the database."""
        with Session(self.database) as db:
            return ask(db)


def by_node(sessions: list[RolloutSession]) -> Counter[str]:
    """How many each node did."""
    return Counter(str(session.node_id) for session in sessions)
