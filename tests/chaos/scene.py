"""What is put under fire: `polar up` as a subprocess, a receiver of its callbacks, and tasks in flight.

Which process is killed and when is `faults.py`'s affair; what must then hold is `promises.py`'s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from polar.db import connect
from polar.embedded import free_port
from polar.models import RolloutSession, SessionEvent, Task
from polar.runtimes import tree

T = TypeVar("T")
AGENT = Path(__file__).with_name("agent.py")
NOTES = "/notes/"
TASKS, SAMPLES = 4, 4
LATENCY_SECONDS = 0.6
START_SECONDS = 90.0
SCRIPT = {
    "scripts": [
        {
            "latency_seconds": LATENCY_SECONDS,
            "answers": [{"content": f"That is number {n}."} for n in ("one", "two", "three")],
        }
    ]
}
SERVICES: dict[str, tuple[str, ...]] = {
    "api": ("workers.api:app",),
    "proxy": ("workers.proxy:app",),
    "beat": ("celery", "-B"),
    "worker": ("celery", "gpu0,scripted"),
    "engine": ("workers.engine", "--script"),
}
"""Words of a command line by which each service is known."""


def words(pid: int) -> list[str]:
    """A process's command line; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def program(pid: int) -> str:
    """The name of its program; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def environ(pid: int) -> dict[str, str]:
    """The variables a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def variables(pid: int) -> dict[str, str]:
    """The same; none once it has ended."""
    try:
        return environ(pid)
    except OSError:
        return {}


def until(what: Callable[[], T], seconds: float, why: Callable[[], str] = str, pause: float = 0.05) -> T:
    """The first true answer of `what`; a service that is away has not answered yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            if found := what():
                return found
        except (httpx.HTTPError, SQLAlchemyError):
            pass
        assert time.monotonic() < end, f"not within {seconds:g} s: {why()}"
        time.sleep(pause)


@dataclass
class Receiver:
    """Takes callbacks, and keeps every body."""

    url: str
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(event, body), in the order of arrival."""


@contextmanager
def receiver(seen: Path) -> Iterator[Receiver]:
    """One that listens, also for the notes of agents that share no folder with it: those go to `seen`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - the library's name
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.startswith(NOTES):
                with (seen / Path(self.path).name).open("ab") as file:
                    file.write(data)
            else:
                found.bodies.append((self.headers["X-Polar-Event"], json.loads(data)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(f"http://127.0.0.1:{server.server_port}/")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


class Scene:
    """A running `polar up`, which a test may kill and start again."""

    def __init__(self, folder: Path, port: int, proxy_port: int, callbacks: Receiver) -> None:
        self.folder, self.home, self.seen = folder, folder / "home", folder / "seen"
        self.port, self.proxy_port, self.callbacks = port, proxy_port, callbacks
        self.seen.mkdir(exist_ok=True)
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        self.env: dict[str, str] = {}
        """Variables of `polar up`, and so of all its processes but the servers that are not Polar's."""
        self.arrangement = ""
        self.process: subprocess.Popen[bytes]
        self._database: Engine | None = None

    # ── processes ──────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start it, again and again while what was killed still holds its ports, until its lanes are alive."""
        end = time.monotonic() + START_SECONDS
        self._launch()
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=2).is_success and self.pid("worker"):
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
            assert time.monotonic() < end, self.log()
            if self.process.poll() is not None:
                time.sleep(0.5)
                if self._database is None:  # nobody knows it yet: another program took a port that was free
                    self.port, self.proxy_port = free_port(), free_port()
                self._launch()
        if self._database is not None:
            self._database.dispose()
        self._database = connect(environ(self.pid("worker"))["POLAR_DATABASE_URL"], pool_size=2)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"X-API-Key": (self.home / "api_key").read_text()},
            timeout=20,
        )

    def _launch(self) -> None:
        flags = ["--home", str(self.home), "--port", str(self.port), "--proxy-port", str(self.proxy_port)]
        argv = [sys.executable, "-m", "polar", "up", *flags, "--script", str(self.folder / "script.json")]
        env = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")} | self.env
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=self.folder)

    def stop(self) -> int:
        """Stop it as Ctrl-C does; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def log(self) -> str:
        """The end of what `polar up` said."""
        return (self.folder / "up.log").read_text(errors="replace")[-3000:]

    def pid(self, name: str) -> int:
        """The process of a service; 0 while it is away."""
        table = tree.processes()
        mine = sorted(pid for pid, found in table.items() if found.parent == self.process.pid)
        for pid in mine:
            said, wanted = words(pid), SERVICES.get(name)
            # A server that is not ours is known by its program: valkey writes what it likes into its command line.
            if program(pid) == name if wanted is None else all(word in said for word in wanted):
                return pid
        return 0

    def agents(self) -> list[int]:
        """The agents that run now and have seen an answer."""
        started = {path.name.partition(".")[0] for path in self.seen.glob("*.jsonl")}
        found = []
        for pid in tree.processes():
            said = words(pid)[1:2]
            if said and said[0].endswith(AGENT.name) and variables(pid).get("SESSION_ID") in started:
                found.append(pid)
        return found

    def left_behind(self) -> list[str]:
        """Processes of sessions, and folders of theirs."""
        spaces = self.home / "workspaces"
        inside = [pid for pid in tree.processes() if self._is_of_a_session(pid, spaces)]
        folders = [str(path) for path in spaces.glob("*/*")]
        return [f"{pid} {' '.join(words(pid))[:120]}" for pid in inside] + folders

    def _is_of_a_session(self, pid: int, spaces: Path) -> bool:
        return variables(pid).get(tree.RUNTIME_MARK, "").startswith(str(spaces))

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────

    def submit(self, backend: str = "local") -> str:
        """Post one task, again until it is acknowledged; its name."""
        shared = backend == "local"
        start = AGENT if shared else AGENT.name
        where = str(self.seen) if shared else self.callbacks.url.rstrip("/") + NOTES
        upload = {"type": "upload_file", "source": str(AGENT), "target": AGENT.name}
        nap = {"type": "exec", "command": "sleep 0.3"}
        name = f"chaos-{uuid.uuid4().hex[:8]}"
        body = {
            "task_id": name,
            "instruction": f"Count for {name}.",
            "num_samples": SAMPLES,
            "timeout_seconds": 240,
            "agent": {"harness": "shell", "custom_shell": {"command": f"exec {sys.executable} {start}"}},
            "runtime": {
                "backend": backend,
                "env": {"CHAOS_SEEN": where},
                "prepare": [nap] if shared else [upload, nap],
            },
            "builder": {"strategy": "prefix_merging"},
            "evaluator": {"strategy": "command", "config": {"command": "sleep 0.3"}},
            "lanes": ["scripted"],
            "callback_url": self.callbacks.url,
            "callback_events": ["task", "session"],
        }
        headers = {"Idempotency-Key": name}
        post = lambda: self.http.post("/rollout/task/submit", json=body, headers=headers)  # noqa: E731
        until(lambda: post().raise_for_status().is_success, 60, self.log)
        return name

    def count(self, names: list[str], stage: str, state: str) -> int:
        """Sessions of these tasks that are there now."""
        query = select(func.count()).select_from(RolloutSession).join(Task).where(Task.task_id.in_(names))
        return self.read(
            lambda db: db.scalar(query.where(RolloutSession.stage == stage, RolloutSession.state == state)) or 0
        )

    def moves(self, names: list[str], move: str) -> int:
        """Moves of that kind which sessions of these tasks have made."""
        query = select(func.count()).select_from(SessionEvent).join(RolloutSession).join(Task)
        return self.read(lambda db: db.scalar(query.where(Task.task_id.in_(names), SessionEvent.move == move)) or 0)

    def open(self, names: list[str]) -> int:
        """Sessions of these tasks that have not ended."""
        query = select(func.count()).select_from(RolloutSession).join(Task).where(Task.task_id.in_(names))
        return self.read(lambda db: db.scalar(query.where(RolloutSession.ended_at.is_(None))) or 0)

    def unclean(self, names: list[str]) -> int:
        """Sessions of these tasks whose runtimes are not noted as gone."""
        query = select(func.count()).select_from(RolloutSession).join(Task).where(Task.task_id.in_(names))
        return self.read(lambda db: db.scalar(query.where(RolloutSession.runtimes != {})) or 0)

    def read(self, ask: Callable[[Session], T]) -> T:
        """Ask the database."""
        assert self._database is not None
        with Session(self._database) as db:
            return ask(db)
