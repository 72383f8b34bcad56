"""What a lane's look, a claim and a poll cost while 1,000, 10,000 and 100,000 sessions wait: it should be the same.

    python -m bench.waiting [--waiting 1000 10000 100000] [--per-task 10000] [--times 30]

Fills a Postgres of its own: as many sessions queued as said, in tasks of `--per-task`, and half as many that ended.
Each call is done `--times` times and rolled back. Prints for each the median milliseconds and the pages of tables and
indexes that Postgres touched, which no busy machine changes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flask.testing import FlaskClient
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

import migrations
from bench import agents
from polar import lanes, lifecycle, placement
from polar.api import create_app
from polar.db import connect
from polar.embedded import EmbeddedPostgres
from polar.lifecycle import Stage
from polar.settings import Settings
from polar.statements import RENEW

MANY = "task-0"
EACH = 8
"""Sessions that the lane runs at once."""
END = """
    UPDATE sessions SET state = 'completed', ended_at = now()
    WHERE task_pk = (SELECT id FROM tasks WHERE task_id = :task)
"""
TOUCHED = """
    SELECT sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read
               + coalesce(toast_blks_hit + toast_blks_read + tidx_blks_hit + tidx_blks_read, 0))
    FROM pg_statio_user_tables
"""
Figures = tuple[float, float]


def fill(url: str, waiting: int, per_task: int) -> str:
    """Tasks of `per_task` sessions, half as many that have ended, and a lane with room for one; the lane's name."""
    database = connect(url, pool_size=1)
    node, lane = agents.node_and_lane(0, EACH)
    with Session(database) as db, db.begin():
        lanes.beat(db, node, lane)
        for number in range(waiting // per_task):
            lifecycle.submit(db, agents.task_request(f"task-{number}", per_task))
        for number in range(0, waiting // 2, per_task):
            lifecycle.submit(db, agents.task_request(f"ended-{number}", min(per_task, waiting // 2)))
            db.execute(text(END), {"task": f"ended-{number}"})
    with Session(database) as db, db.begin():
        ids = placement.place(db, lane.name)
    agents.set_running(database, ids[: EACH - 1])
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    database.dispose()
    return lane.name


def measured(connection: Connection, action: Callable[[Session], object], times: int) -> Figures:
    """Median milliseconds, and pages touched by one."""
    spent, before = [], _touched(connection)
    for _ in range(times):
        began = time.perf_counter()
        with Session(connection, join_transaction_mode="rollback_only") as db:
            action(db)
            db.flush()
            spent.append((time.perf_counter() - began) * 1000)
            db.rollback()
        connection.rollback()
    return statistics.median(spent), (_touched(connection) - before) / times


def polled(connection: Connection, client: FlaskClient, times: int) -> Figures:
    """The same of a trainer's question how its task is doing, through the API."""
    spent, before = [], _touched(connection)
    for _ in range(times):
        began = time.perf_counter()
        answer = client.get(f"/rollout/task/{MANY}?view=summary")
        spent.append((time.perf_counter() - began) * 1000)
        assert answer.status_code == 200, answer.text
    return statistics.median(spent), (_touched(connection, ours=False) - before) / times


def _touched(connection: Connection, *, ours: bool = True) -> float:
    if ours:
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
    else:
        time.sleep(1.5)  # the API's own connection tells what it touched when a second has passed
    connection.commit()
    found = connection.execute(text(TOUCHED)).scalar_one()
    connection.commit()
    return float(found)


def run(waiting: int, per_task: int, times: int) -> dict[str, Figures]:
    """All calls at one size, on a fresh Postgres."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = EmbeddedPostgres(Path(folder) / "postgres")
        server.start()
        try:
            migrations.upgrade(server.url)
            lane = fill(server.url, waiting, per_task)
            app = create_app(Settings(database_url=server.url, home=folder, auth="open"), None)  # type: ignore[arg-type]
            database = connect(server.url, pool_size=1)
            with database.connect() as connection:
                ready = "SELECT id FROM sessions WHERE lane = :lane AND state = 'queued' LIMIT 1"
                ready_id = connection.execute(text(ready), {"lane": lane}).scalar_one()
                held = "SELECT id FROM sessions WHERE lane = :lane AND state = 'running'"
                running = list(connection.execute(text(held), {"lane": lane}).scalars())
                connection.execute(text("UPDATE lanes SET max_execute = max_execute + 1"))
                connection.commit()
                renewed = {"ids": running, "attempts": [1] * len(running), "seconds": 10, "state": "running"}
                calls: dict[str, Callable[[Session], object]] = {
                    "a lane places one": lambda db: placement.place(db, lane),
                    "claim of a placed one": lambda db: lifecycle.claim(db, ready_id, Stage.PREWARM, "w", lane),
                    "who waits to execute": lambda db: placement.waiting_to_execute(db, lane),
                    "renew the lane's leases": lambda db: db.execute(RENEW, renewed),
                    "sweep: unwoken": placement.unwoken,
                }
                found = {name: measured(connection, action, times) for name, action in calls.items()}
                found["poll of a task, summary"] = polled(connection, app.test_client(), times)
                return found
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--waiting", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--per-task", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=30)
    asked = parser.parse_args()
    runs = [run(waiting, min(asked.per_task, waiting), asked.times) for waiting in asked.waiting]
    table = Table("call", *(f"{waiting:,}: ms | pages" for waiting in asked.waiting))
    for name in runs[0]:
        table.add_row(name, *(f"{each[name][0]:.1f} | {each[name][1]:,.0f}" for each in runs))
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
