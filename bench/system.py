"""All of Polar under load on this machine: real Postgres, broker, API, proxy, Celery worker, clock, scripted engines.

Starts them as `polar up -c topology.yaml` does, and reads what each kind of process, the database and the broker cost.
What is submitted and what is printed is the benchmark's own affair.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import redis
import yaml
from sqlalchemy import text

from bench.measure import children, family, server
from polar.cli.client import Client
from polar.cli.services import secret_file
from polar.db import connect
from polar.embedded import EmbeddedBroker, EmbeddedPostgres, free_port
from polar.keys import PREFIX

ANSWERS = [{"content": "one"}, {"content": "two"}]
AGENT = Path(__file__).with_name("agent.sh")
START_SECONDS = 90.0
TICKS = os.sysconf("SC_CLK_TCK")
LABELS = {"workers.api": "api", "workers.proxy": "proxy", "sweep": "clock", "worker": "worker"}
"""A word of a service's command line, and what the service is called here; the first that is there counts."""


@dataclass(frozen=True)
class Use:
    """What one kind of process has used since it started."""

    cpu: float
    agents: float
    """CPU seconds of the programs that it ran and that have ended."""
    memory: int
    """Bytes of memory that are its own."""


@dataclass(frozen=True)
class Reading:
    """Everything at one moment."""

    at: float
    ended: int
    uses: dict[str, Use]
    commits: int
    wal: int
    messages: int
    """Celery messages that were ever published."""
    broker_bytes: int


class System:
    """Up while inside."""

    def __init__(self, home: Path, lanes: int, max_execute: int) -> None:
        self.home, self.lanes, self.max_execute = home, [f"gpu{number}" for number in range(lanes)], max_execute
        self._stack = ExitStack()

    def __enter__(self) -> System:
        try:
            return self._start()
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> System:
        script = self.home / "script.json"
        script.write_text(json.dumps({"scripts": [{"answers": ANSWERS}]}))
        self.postgres, self.broker = EmbeddedPostgres(self.home / "postgres"), EmbeddedBroker(self.home / "broker")
        for each in (self.postgres, self.broker):
            each.start()
            self._stack.callback(each.stop)
        urls = {}
        self.engines = []
        for lane in self.lanes:
            urls[lane] = f"http://127.0.0.1:{(port := free_port())}"
            argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port)]
            self.engines.append(self._stack.enter_context(server(argv, f"{urls[lane]}/model_info")).pid)
        self.database = connect(self.postgres.url, pool_size=1)
        self._stack.callback(self.database.dispose)
        self._redis = redis.Redis.from_url(self.broker.url)
        self._stack.callback(self._redis.close)
        self.client = self._up(urls)
        return self

    def _up(self, engines: dict[str, str]) -> Client:
        port = free_port()
        lanes = [
            {"name": name, "engine": {"base_url": url}, "max_execute": self.max_execute, "ready_buffer": 8}
            for name, url in engines.items()
        ]
        node = {"id": "local", "port": free_port(), "lanes": lanes, "default_runtime": {"backend": "local"}}
        topology = self.home / "given.yaml"
        topology.write_text(yaml.safe_dump({"rollout": {"port": port}, "gateway": {"nodes": [node]}}))
        key = secret_file(self.home / "home" / "api_key", PREFIX)
        argv = [sys.executable, "-m", "polar", "up", "-c", str(topology), "--home", str(self.home / "home")]
        env = {
            **os.environ,
            "POLAR_DATABASE_URL": self.postgres.url,
            "POLAR_BROKER_URL": self.broker.url,
            "POLAR_LOG_LEVEL": "WARNING",
        }
        log = self._stack.enter_context((self.home / "up.log").open("w"))
        self.up = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
        self._stack.callback(_stop, self.up)
        client = Client(f"http://127.0.0.1:{port}", key)
        deadline = time.monotonic() + START_SECONDS
        while not _ready(client):
            if self.up.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException(f"Polar did not start:\n{(self.home / 'up.log').read_text()[-2000:]}")
            time.sleep(0.1)
        return client

    def task(self, name: str, sessions: int) -> dict[str, Any]:
        """A task of so many trivial sessions."""
        return {
            "task_id": name,
            "instruction": "count",
            "num_samples": sessions,
            "agent": {"harness": "shell", "custom_shell": {"command": f". {AGENT}"}},
            "runtime": {"backend": "local"},
            "builder": {"strategy": "prefix_merging"},
            "evaluator": {"strategy": "session_completed"},
        }

    def read(self) -> Reading:
        """What is used now."""
        uses = {"postgres": _use(self.postgres.pid or 0, own_children=True), "broker": _use(self.broker.pid or 0)}
        for pid in children(self.up.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            name = next((label for word, label in LABELS.items() if any(word.encode() in each for each in words)), None)
            if name is not None:
                uses[name] = _use(pid)
        engines = [_use(pid) for pid in self.engines]
        uses["engines"] = Use(sum(each.cpu for each in engines), 0.0, sum(each.memory for each in engines))
        with self.database.connect() as db:
            ended = db.execute(text("SELECT count(*) FROM sessions WHERE ended_at IS NOT NULL")).scalar() or 0
            sums = "SELECT xact_commit, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0') FROM pg_stat_database "
            commits, wal = db.execute(text(sums + "WHERE datname = current_database()")).one()
        published = self._redis.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0)
        memory = self._redis.info("memory")["used_memory"]
        return Reading(time.monotonic(), ended, uses, commits, int(wal), published, memory)

    def ended(self) -> int:
        """How many sessions have ended."""
        with self.database.connect() as db:
            return db.execute(text("SELECT count(*) FROM sessions WHERE ended_at IS NOT NULL")).scalar() or 0


def _use(root: int, *, own_children: bool = False) -> Use:
    """A service's processes together. What ended under them is an agent's, except where children are its own."""
    cpu = agents = 0
    memory = 0
    pids = family(root)
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
            text_ = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        own, gone = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        # An agent that runs at this moment is a shell below a worker.
        if not own_children and argv.startswith((b"bash", b"sh")):
            agents += own + gone
            continue
        cpu += own + (gone if own_children else 0)
        agents += 0 if own_children else gone
        memory += sum(int(line.split()[1]) for line in text_.splitlines() if line.startswith("Private_")) << 10
    return Use(cpu / TICKS, agents / TICKS, memory)


def _ready(client: Client) -> bool:
    try:
        return bool(client.call("GET", "/readyz"))
    except click.ClickException:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
