"""Ten thousand sessions at once on one machine: what they cost, where they wait, and whether anything grows.

    python -m bench.load [--sessions 10000] [--lanes 1] [--samples 0] [--compare]

Starts its own Polar in a temporary folder, submits every session before the first one runs (shell harness, three model
calls, scripted engine without latency), and prints: sessions per second and CPU per session in each quarter of the run,
p50 and p99 of each stage's queueing and work, CPU and memory by kind of process, rows and bytes by table.
`--samples 8` makes tasks of 8 sessions instead of one task; `--compare` runs 1, 2 and 4 lanes and prints one table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from sqlalchemy import text

from bench.system import Reading, System
from polar.dispatch import STAGE_NAMES

console = Console(highlight=False, width=120)
LANES = (1, 2, 4)
QUARTERS = 4
KINDS = ("api", "worker", "proxy", "clock", "postgres", "broker", "engines")
STAGE_TIMES = """
    SELECT percentile_disc(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY (timing -> :stage ->> 'queued_ms')::int),
           percentile_disc(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY (timing -> :stage ->> 'run_ms')::int)
    FROM sessions WHERE timing ? :stage
"""
TABLES = """
    SELECT relname, pg_table_size(c.oid), pg_indexes_size(c.oid) FROM pg_class c JOIN pg_namespace n
    ON n.oid = relnamespace WHERE relkind = 'r' AND nspname = 'public' ORDER BY pg_total_relation_size(c.oid) DESC
"""


@dataclass
class Run:
    """One measurement."""

    sessions: int
    lanes: int
    submit_seconds: float
    readings: list[Reading]
    """Before the submit, and after each quarter of the sessions."""
    states: dict[str, int]
    stages: dict[str, tuple[list[int], list[int]]]
    tables: list[tuple[str, int, int, int]]
    """Name, rows, bytes, bytes of indexes."""
    errors: list[str]

    @property
    def seconds(self) -> float:
        return self.readings[-1].at - self.readings[0].at - self.submit_seconds


def measure(sessions: int, lanes: int, samples: int, max_execute: int) -> Run:
    """One run on a fresh Polar."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        System(Path(folder), lanes, max_execute) as system,
    ):
        time.sleep(3.0)  # what a start leaves to do is not the load's
        readings = [system.read()]
        began = time.monotonic()
        each = samples or sessions
        for number, first in enumerate(range(0, sessions, each)):
            task = system.task(f"load-{number}", min(each, sessions - first))
            system.client.call("POST", "/rollout/task/submit", json=task)
        submit_seconds = time.monotonic() - began
        _watch(system, sessions, lanes, readings)
        return _result(system, sessions, lanes, submit_seconds, readings)


def _watch(system: System, sessions: int, lanes: int, readings: list[Reading]) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), "sessions", TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(f"{lanes} lanes" if lanes > 1 else "1 lane", *columns, console=console) as progress:
        bar = progress.add_task("", total=sessions)
        while (ended := system.ended()) < sessions:
            progress.update(bar, completed=ended)
            if ended >= sessions * len(readings) / QUARTERS:
                readings.append(system.read())
            time.sleep(1.0)
        progress.update(bar, completed=ended)
    readings.append(system.read())


def _result(system: System, sessions: int, lanes: int, submit_seconds: float, readings: list[Reading]) -> Run:
    with system.database.connect() as db:
        states = dict(list(db.execute(text("SELECT state, count(*) FROM sessions GROUP BY state"))))
        stages = {}
        for stage in STAGE_NAMES:
            queued, ran = db.execute(text(STAGE_TIMES), {"stage": stage}).one()
            stages[stage] = (queued or [0, 0], ran or [0, 0])
        tables = []
        for name, size, indexes in db.execute(text(TABLES)):
            rows = db.execute(text(f'SELECT count(*) FROM "{name}"')).scalar() or 0
            tables.append((name, rows, size, indexes))
        errors = [
            str(row[0]) for row in db.execute(text("SELECT error FROM sessions WHERE state <> 'completed' LIMIT 3"))
        ]
    return Run(sessions, lanes, submit_seconds, readings, states, stages, tables, errors)


def show(run: Run) -> None:
    """All tables of one run."""
    first, last = run.readings[0], run.readings[-1]
    each = 1 / run.sessions
    done = run.states.get("completed", 0)
    table = Table("figure", "value", title=f"{run.sessions:,} sessions, lanes: {run.lanes}")
    table.add_row("completed", f"{done:,} of {run.sessions:,}" + (f"; {run.errors}" if run.errors else ""))
    table.add_row("submit, all of them", f"{run.submit_seconds:.2f} s")
    table.add_row("sessions per second", f"{done / run.seconds:.1f}")
    table.add_row("transactions per session", f"{(last.commits - first.commits) * each:.1f}")
    table.add_row("write-ahead log per session", f"{(last.wal - first.wal) * each / 1000:.1f} kB")
    table.add_row("Celery messages per session", f"{(last.messages - first.messages) * each:.1f}")
    table.add_row("broker memory", " → ".join(f"{r.broker_bytes / 1e6:.1f}" for r in run.readings) + " MB")
    console.print(table)
    console.print(_quarters(run))
    console.print(_stages(run))
    console.print(_processes(run))
    console.print(_tables(run))


def _quarters(run: Run) -> Table:
    table = Table(
        "until session", "sessions/s", "CPU of Polar, ms per session", "Postgres, ms", "agents, ms", "engines, ms"
    )
    for before, after in zip(run.readings, run.readings[1:], strict=False):
        count = max(1, after.ended - before.ended)
        parts = {kind: 1000 * _cpu(before, after, kind) / count for kind in KINDS if kind in after.uses}
        own = sum(ms for kind, ms in parts.items() if kind != "engines")
        agents = 1000 * _agents(before, after) / count
        rate = count / (after.at - before.at)
        figures = (own, parts.get("postgres", 0.0), agents, parts.get("engines", 0.0))
        table.add_row(f"{after.ended:,}", f"{rate:.1f}", *(f"{ms:.1f}" for ms in figures))
    return table


def _stages(run: Run) -> Table:
    table = Table("stage", "queued ms p50", "p99", "ran ms p50", "p99")
    for stage, (queued, ran) in run.stages.items():
        table.add_row(stage, *(f"{value:,}" for value in (*queued, *ran)))
    return table


def _processes(run: Run) -> Table:
    first, last = run.readings[0], run.readings[-1]
    middle = run.readings[len(run.readings) // 2]
    table = Table("process", "CPU ms per session", "share", "MB at start", "middle", "end")
    agents = 1000 * _agents(first, last) / run.sessions
    spent = {kind: 1000 * _cpu(first, last, kind) / run.sessions for kind in KINDS if kind in last.uses}
    total = sum(spent.values()) + agents
    for kind, ms in spent.items():
        memory = [f"{r.uses[kind].memory / 1e6:.1f}" if kind in r.uses else "–" for r in (first, middle, last)]
        table.add_row(kind, f"{ms:.2f}", f"{100 * ms / total:.0f} %", *memory)
    table.add_row("agents", f"{agents:.2f}", f"{100 * agents / total:.0f} %", "", "", "")
    return table


def _tables(run: Run) -> Table:
    table = Table("table", "rows", "rows per session", "bytes per session", "of them indexes", "MB")
    for name, rows, size, indexes in run.tables:
        whole = size + indexes
        if rows:
            share = (rows / run.sessions, whole / run.sessions, indexes / run.sessions)
            table.add_row(
                name, f"{rows:,}", f"{share[0]:.2f}", f"{share[1]:,.0f}", f"{share[2]:,.0f}", f"{whole / 1e6:.1f}"
            )
    return table


def _cpu(before: Reading, after: Reading, kind: str) -> float:
    return after.uses[kind].cpu - (before.uses[kind].cpu if kind in before.uses else 0.0)


def _agents(before: Reading, after: Reading) -> float:
    return sum(use.agents for use in after.uses.values()) - sum(use.agents for use in before.uses.values())


def compare(runs: list[Run]) -> Table:
    """The same load on more lanes, side by side."""
    table = Table(
        "lanes", "sessions/s", "CPU of Polar, ms per session", "agents, ms", "engines, ms", "worker MB", "broker MB"
    )
    for run in runs:
        first, last = run.readings[0], run.readings[-1]
        own = sum(_cpu(first, last, kind) for kind in KINDS if kind != "engines" and kind in last.uses)
        figures: list[Any] = [1000 * own / run.sessions, 1000 * _agents(first, last) / run.sessions]
        figures += [1000 * _cpu(first, last, "engines") / run.sessions]
        figures += [last.uses["worker"].memory / 1e6, last.broker_bytes / 1e6]
        rate = run.states.get("completed", 0) / run.seconds
        table.add_row(str(run.lanes), f"{rate:.1f}", *(f"{value:.1f}" for value in figures))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--samples", type=int, default=0, help="sessions of one task; 0: all in one")
    parser.add_argument("--max-execute", type=int, default=8, help="agents at once on a lane")
    parser.add_argument("--compare", action="store_true", help="run with 1, 2 and 4 lanes")
    arguments = parser.parse_args()
    counts = LANES if arguments.compare else (arguments.lanes,)
    runs = []
    for lanes in counts:
        runs.append(measure(arguments.sessions, lanes, arguments.samples, arguments.max_execute))
        show(runs[-1])
    if len(runs) > 1:
        console.print(compare(runs))


if __name__ == "__main__":
    main()
