"""One Postgres under 100 nodes of 64 sessions: which transactions a fleet needs, and what they cost.

    python -m bench.scale [--nodes 100] [--sessions 64] [--seconds 90] [--threads 24]

Simulates the fleet in virtual time: every session's moves, model calls, heartbeats and sweeps are due when a fleet
would send them, and are sent as fast as this machine's Postgres takes them. The factor between both times is printed,
and for each kind of transaction: how many a second of the fleet needs, Postgres's CPU and write-ahead log for each,
the Postgres cores that all of them need, and how long they took here. No harness, no engine, no worker runs.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import joinedload

import migrations
from bench import agents
from bench.agents import SESSION_WORK, Virtual, Work
from bench.measure import process_cpu, tree_cpu
from polar import lanes, lifecycle, placement
from polar.db import connect, transaction
from polar.embedded import EmbeddedPostgres
from polar.lifecycle import HEARTBEAT_SECONDS, Stage
from polar.models import RolloutSession

console = Console(highlight=False, width=130)
AGENT_SECONDS, CALLS = 120.0, 30
ENGINE_SHARE = 0.75
"""Of the time of a turn: the engine's; the rest is the agent's own tools."""
LANE_BEAT_SECONDS, SWEEP_SECONDS, SHORT_SECONDS = 5.0, 3.0, 0.3
WAITING_TASKS, SAMPLES = 1_000, 8
KINDS = (*SESSION_WORK, "claim", "look", "renew", "beat", "sweep")
USED = """
    SELECT a.application_name, a.pid, (pg_stat_get_backend_wal(a.pid)).wal_bytes
    FROM pg_stat_activity a WHERE a.datname = current_database() AND a.application_name <> ''
"""
WAITS = """
    SELECT application_name, wait_event_type || ' ' || wait_event FROM pg_stat_activity
    WHERE state = 'active' AND wait_event IS NOT NULL AND application_name = ANY(:kinds)
"""
UPDATES = """
    SELECT relname, n_tup_ins, n_tup_upd, n_tup_hot_upd, n_dead_tup, pg_table_size(relid), pg_indexes_size(relid)
    FROM pg_stat_user_tables WHERE n_tup_ins + n_tup_upd > 100 ORDER BY n_tup_upd DESC
"""


@dataclass(order=True)
class Due:
    """Something to be done at a virtual moment."""

    at: float
    order: int
    kind: str = field(compare=False)
    action: Callable[[Work], Any] = field(compare=False)
    then: Callable[[float, Any], None] = field(compare=False)


class Fleet:
    """The nodes and their sessions, and what is due."""

    def __init__(self, nodes: int, each: int, seed: int = 1) -> None:
        self.each = each
        self.nodes = [agents.node_and_lane(number, each) for number in range(nodes)]
        self.running: dict[str, dict[str, Virtual]] = {lane.name: {} for _, lane in self.nodes}
        self.ready: dict[str, deque[str]] = {name: deque() for name in self.running}
        self.placed: dict[str, list[str]] = {}
        self.due: list[Due] = []
        self._order = itertools.count()
        self._random = random.Random(seed)
        self.ended = 0

    def prepare(self, database: Engine) -> None:
        """Rows of a fleet in the middle of its day: every lane full, agents anywhere in their runs, a queue behind."""
        with transaction(database) as db:
            for node, lane in self.nodes:
                lanes.beat(db, node, lane)
        for start in range(0, len(self.nodes) * self.each // SAMPLES + WAITING_TASKS, 100):
            with transaction(database) as db:
                for number in range(start, start + 100):
                    lifecycle.submit(db, agents.task_request(f"task-{number}", SAMPLES))
        for _, lane in self.nodes:
            with transaction(database) as db:
                ids = placement.place(db, lane.name)
            agents.set_running(database, ids[: self.each])
            self.placed[lane.name] = ids
        with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))

    def start(self, database: Engine) -> None:
        """Everything that a running fleet has on its way."""
        calling: list[Virtual] = []
        with transaction(database) as db:
            for node, lane in self.nodes:
                for session_id in self.placed[lane.name][self.each :]:
                    self.stage(self._random.uniform(0, 1), session_id, Stage.PREWARM, lane.name)
                running = RolloutSession.id.in_(self.placed[lane.name][: self.each])
                for row in db.scalars(select(RolloutSession).where(running).options(joinedload(RolloutSession.task))):
                    assert row.key_hash is not None
                    virtual = Virtual(row, calls=self._random.randrange(CALLS), key_hash=row.key_hash)
                    self.running[lane.name][row.id] = virtual
                    calling += [virtual] * self._join(virtual)
                for every, kind in ((HEARTBEAT_SECONDS, "renew"), (LANE_BEAT_SECONDS, "beat")):
                    self.repeat(self._random.uniform(0, every), every, kind, partial(self._node_work, kind, node, lane))
        self.repeat(0.0, SWEEP_SECONDS, "sweep", agents.swept)
        agents.in_flight(database, calling)

    def _join(self, virtual: Virtual) -> bool:
        """Take up a session anywhere in a turn, so that no second of the fleet is unlike another; True in a call."""
        whole = self._random.uniform(0.5, 1.5) * AGENT_SECONDS / CALLS
        at = self._random.random()
        following = partial(self._after_turn, virtual, whole * (1 - ENGINE_SHARE))
        if at < ENGINE_SHARE:
            self.steps(0.0, virtual, [("settle", (ENGINE_SHARE - at) * whole), ("delivered", 0.01)], following)
        else:
            self._after_turn(virtual, (1 - at) * whole, 0.0)
        return at < ENGINE_SHARE

    def add(
        self, at: float, kind: str, action: Callable[[Work], Any], then: Callable[[float, Any], None] = lambda *_: None
    ) -> None:
        heapq.heappush(self.due, Due(at, next(self._order), kind, action, then))

    def repeat(self, at: float, every: float, kind: str, action: Callable[[Work], Any]) -> None:
        def again(moment: float, found: Any) -> None:
            for lane in found if kind == "sweep" else ():
                self.look(moment, lane)
            self.add(moment + every, kind, action, again)

        self.add(at, kind, action, again)

    def _node_work(self, kind: str, node: Any, lane: Any, work: Work) -> None:
        if kind == "beat":
            agents.beat(work, node, lane)
        elif held := [(virtual.row.id, virtual.row.attempt) for virtual in list(self.running[lane.name].values())]:
            agents.renew(work, held)

    def turn(self, at: float, virtual: Virtual) -> None:
        """A model call and what follows it."""
        whole = self._random.uniform(0.5, 1.5) * AGENT_SECONDS / CALLS
        steps = [("find", 0.0), ("intent", 0.01), ("settle", ENGINE_SHARE * whole), ("delivered", 0.01)]
        self.steps(at, virtual, steps, partial(self._after_turn, virtual, whole * (1 - ENGINE_SHARE)))

    def _after_turn(self, virtual: Virtual, pause: float, at: float) -> None:
        if virtual.calls < CALLS:
            self.turn(at + pause, virtual)
        else:
            self.steps(at + pause, virtual, [("advance", 0.0)], partial(self._executed, virtual))

    def _executed(self, virtual: Virtual, at: float) -> None:
        lane = str(virtual.row.lane)
        del self.running[lane][virtual.row.id]
        if self.ready[lane]:
            self.stage(at, self.ready[lane].popleft(), Stage.EXECUTE, lane)
        self.look(at, lane)
        self.stage(at, virtual.row.id, Stage.RECONSTRUCT, lane)

    def look(self, at: float, lane: str) -> None:
        """A lane looks, and what it took is prewarmed."""

        def placed(moment: float, ids: list[str]) -> None:
            for session_id in ids:
                self.stage(moment, session_id, Stage.PREWARM, lane)

        self.add(at, "look", lambda work: agents.place(work, lane), placed)

    def stage(self, at: float, session_id: str, stage: Stage, lane: str) -> None:
        """A stage from its claim to its end."""

        def claimed(moment: float, row: Any) -> None:
            if row is None:  # execute is full: the lane wakes it when there is room
                self.ready[lane].append(session_id)
                return
            virtual = Virtual(row)
            if stage is Stage.EXECUTE:
                self.running[lane][row.id] = virtual
                self.steps(moment, virtual, [("keep", 0.1)], partial(self.turn_first, virtual))
            else:
                steps = [("keep", SHORT_SECONDS), ("advance", 0.01)]
                self.steps(moment, virtual, steps, partial(self._staged, virtual, stage, lane))

        self.add(at, "claim", lambda work: agents.claim(work, session_id, stage, lane), claimed)

    def turn_first(self, virtual: Virtual, at: float) -> None:
        self.turn(at, virtual)

    def _staged(self, virtual: Virtual, stage: Stage, lane: str, at: float) -> None:
        following = lifecycle.next_stage(stage)
        if following is None:
            self.ended += 1
            self.steps(at, virtual, [("clean", 0.0)], lambda _: None)
        else:
            self.stage(at, virtual.row.id, following, lane)

    def steps(self, at: float, virtual: Virtual, steps: list[tuple[str, float]], then: Callable[[float], None]) -> None:
        """Kinds of work for one session, one after the other, each so many seconds after the one before."""
        (kind, pause), *rest = steps

        def done(moment: float, _: Any) -> None:
            if rest:
                self.steps(moment, virtual, rest, then)
            else:
                then(moment)

        self.add(at + pause, kind, lambda work: SESSION_WORK[kind](work, virtual), done)


@dataclass
class Figures:
    """What a simulation found."""

    virtual: float
    real: float
    counts: Counter[str]
    took: dict[str, list[float]]
    cpu: dict[str, float]
    wal: dict[str, int]
    background: float
    waits: Counter[tuple[str, str]]
    looks: int
    updates: list[Any]
    connections: int
    ended: int
    errors: Counter[str]


class Simulation:
    """Takes what is due in its order and sends it, as fast as Postgres answers."""

    def __init__(self, fleet: Fleet, postgres: EmbeddedPostgres, threads: int) -> None:
        self.fleet, self.postgres = fleet, postgres
        self.pool = ThreadPoolExecutor(threads)
        self.threads = threads
        self.works = {kind: Work(postgres.url, kind, threads) for kind in KINDS}
        self.database = connect(postgres.url, pool_size=2)
        self.took: dict[str, list[float]] = defaultdict(list)
        self.waits: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[str] = Counter()
        self.samples = 0
        self._clock = 0.0
        self._stop = threading.Event()

    def run(self, seconds: float) -> Figures:
        """For so many real seconds."""
        self._until(4.0)  # connections open, plans and caches fill
        self.took.clear()
        ended, began, clock = self.fleet.ended, time.monotonic(), self._clock
        before, everything = self._used(), tree_cpu(self.postgres.pid or 0)
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        with Progress(TextColumn("virtual {task.fields[virtual]:.1f} s"), BarColumn(), TimeElapsedColumn()) as progress:
            bar = progress.add_task("", total=seconds, virtual=0.0)
            while (spent := time.monotonic() - began) < seconds:
                self._until(min(1.0, seconds - spent))
                progress.update(bar, completed=spent, virtual=self._clock - clock)
        real = time.monotonic() - began
        self._stop.set()
        watcher.join()
        used = self._used()
        # A kind that had no connection yet when the measurement began used nothing before.
        cpu = {kind: used[kind][0] - before.get(kind, (0.0, 0))[0] for kind in KINDS if kind in used}
        wal = {kind: used[kind][1] - before.get(kind, (0.0, 0))[1] for kind in cpu}
        with self.database.connect() as db:
            connections = db.execute(
                text("SELECT count(*) FROM pg_stat_activity WHERE application_name <> ''")
            ).scalar()
            updates = list(db.execute(text(UPDATES)))
        background = tree_cpu(self.postgres.pid or 0) - everything - sum(cpu.values())
        counts = Counter({kind: len(each) for kind, each in self.took.items()})
        return Figures(
            virtual=self._clock - clock,
            real=real,
            counts=counts,
            took=self.took,
            cpu=cpu,
            wal=wal,
            background=background,
            waits=self.waits,
            looks=self.samples,
            updates=updates,
            connections=connections or 0,
            ended=self.fleet.ended - ended,
            errors=self.errors,
        )

    def _until(self, seconds: float) -> None:
        """Send for so many real seconds, and wait for what was sent."""
        end = time.monotonic() + seconds
        flying: dict[Future[Any], Due] = {}
        while time.monotonic() < end or flying:
            while time.monotonic() < end and len(flying) < self.threads and self.fleet.due:
                due = heapq.heappop(self.fleet.due)
                self._clock = max(self._clock, due.at)
                flying[self.pool.submit(self._send, due)] = due
            done, _not = wait(flying, return_when=FIRST_COMPLETED)
            for future in done:
                due = flying.pop(future)
                if (error := future.exception()) is not None:
                    self.errors[f"{due.kind}: {type(error).__name__}: {str(error).splitlines()[0][:90]}"] += 1
                else:
                    due.then(due.at, future.result())

    def _send(self, due: Due) -> Any:
        began = time.perf_counter()
        found = due.action(self.works[due.kind])
        self.took[due.kind].append(time.perf_counter() - began)
        return found

    def _used(self) -> dict[str, tuple[float, int]]:
        """CPU seconds and bytes of write-ahead log of each kind's backends; they live as long as the simulation."""
        found: dict[str, tuple[float, int]] = {}
        with self.database.connect() as db:
            for kind, pid, wal in db.execute(text(USED)):
                cpu, log = found.get(kind, (0.0, 0))
                # The embedded Postgres has no process namespace of its own: its pids are the machine's.
                found[kind] = (cpu + process_cpu(pid), log + int(wal or 0))
        return found

    def _watch(self) -> None:
        with self.database.connect() as db:
            while not self._stop.wait(0.1):
                self.samples += 1
                self.waits.update((row[0], row[1]) for row in db.execute(text(WAITS), {"kinds": list(KINDS)}))
                db.rollback()

    def close(self) -> None:
        self.pool.shutdown()


def show(figures: Figures, nodes: int, each: int) -> None:
    """The tables."""
    console.print(
        f"{nodes} nodes × {each} sessions, agents of {AGENT_SECONDS:g} s with {CALLS} model calls: "
        f"{figures.virtual:.1f} virtual seconds in {figures.real:.1f} s, "
        f"factor {figures.virtual / figures.real:.3f}; {figures.ended} sessions ended"
    )
    table = Table(
        "kind", "per fleet second", "Postgres CPU, ms", "cores needed", "WAL, B", "WAL MB/s", "p50 ms here", "p99 ms"
    )
    total = [0.0, 0.0, 0.0]
    for kind in sorted(figures.counts, key=lambda kind: -figures.cpu.get(kind, 0.0)):
        count, took = figures.counts[kind], sorted(figures.took[kind])
        rate, cpu, wal = count / figures.virtual, figures.cpu.get(kind, 0.0) / count, figures.wal.get(kind, 0) / count
        total = [total[0] + rate, total[1] + rate * cpu, total[2] + rate * wal / 1e6]
        times = (1000 * took[len(took) // 2], 1000 * took[int(len(took) * 0.99)])
        table.add_row(
            kind,
            f"{rate:,.1f}",
            f"{1000 * cpu:.2f}",
            f"{rate * cpu:.2f}",
            f"{wal:,.0f}",
            f"{rate * wal / 1e6:.2f}",
            f"{times[0]:.1f}",
            f"{times[1]:.1f}",
        )
    background = figures.background / figures.virtual
    table.add_row("background", "", "", f"{background:.2f}", "", "", "", "")
    table.add_row("all", f"{total[0]:,.0f}", "", f"{total[1] + background:.2f}", "", f"{total[2]:.1f}", "", "")
    console.print(table)
    waits = Table("waits, of active backends", "kind", "backends waiting on average")
    for (kind, event), count in figures.waits.most_common(12):
        waits.add_row(event, kind, f"{count / max(1, figures.looks):.3f}")
    console.print(waits)
    rows = Table("table", "inserts", "updates", "HOT", "dead rows", "MB", "of indexes, MB")
    for name, inserts, updates, hot, dead, size, indexes in figures.updates:
        share = f"{100 * hot / updates:.0f} %" if updates else "–"
        rows.add_row(
            name, f"{inserts:,}", f"{updates:,}", share, f"{dead:,}", f"{size / 1e6:.1f}", f"{indexes / 1e6:.1f}"
        )
    console.print(rows)
    console.print(f"connections open here: {figures.connections}; errors: {dict(figures.errors) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=64, help="agents at once on a node")
    parser.add_argument("--seconds", type=float, default=90.0, help="real seconds that are measured")
    parser.add_argument("--threads", type=int, default=12, help="transactions at once")
    arguments = parser.parse_args()
    # Leases and beats are due in virtual time, but expire by the clock on the wall.
    for module in (lifecycle, placement, lanes):
        module.LANE_ALIVE_SECONDS = 86_400.0
    lifecycle.LEASE_SECONDS = lifecycle.REWAKE_SECONDS = 86_400.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        postgres = EmbeddedPostgres(Path(folder) / "postgres")
        postgres.start()
        try:
            migrations.upgrade(postgres.url)
            fleet = Fleet(arguments.nodes, arguments.sessions)
            with console.status("filling the tables"):
                database = connect(postgres.url, pool_size=2)
                fleet.prepare(database)
                fleet.start(database)
            simulation = Simulation(fleet, postgres, arguments.threads)
            figures = simulation.run(arguments.seconds)
            simulation.close()
        finally:
            postgres.stop()
    show(figures, arguments.nodes, arguments.sessions)


if __name__ == "__main__":
    main()
