"""What `polar doctor` reads from Postgres: the server, its version of the tables, clocks, lanes, and the sweeper.

Everything that is wrong comes with what to do. Addresses and engines are asked by `doctor`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

import migrations
from polar import lanes, queries
from polar.clock import now
from polar.db import connect
from polar.errors import SpecError
from polar.lifecycle import LANE_ALIVE_SECONDS
from polar.models import Task
from polar.registry import load
from polar.runtimes import RUNTIMES
from polar.runtimes.base import Runtime
from polar.settings import Settings

SKEW_SECONDS = 5.0
SWEPT_SECONDS = 30.0


class Check(NamedTuple):
    """What was looked at, what was found, and what to do: nothing only where all is well."""

    name: str
    found: str
    do: str | None = None


def checks(url: str, settings: Settings) -> Iterator[Check]:
    """Everything that this database tells."""
    engine = connect(url, pool_size=1)
    try:
        with engine.connect() as connection:
            yield Check("postgres", str(connection.execute(text("SHOW server_version")).scalar()))
            behind = migrations.missing(connection)
            yield _version(behind)
            yield _clock(connection)
            if not behind:
                with Session(connection) as db:
                    yield from _lanes(db, settings)
                    yield _sweeper(db)
                    yield from _runtimes(db)
    except SQLAlchemyError as error:
        first = str(error).splitlines()[0]
        yield Check("postgres", first, "check POLAR_DATABASE_URL and that the server runs")
    finally:
        engine.dispose()


def lacking(name: str) -> str | None:
    """Why this machine cannot run a runtime; None if it can."""
    try:
        return load("runtime", RUNTIMES, name, Runtime).unavailable()  # type: ignore[type-abstract]
    except SpecError as error:
        return error.message


def _version(behind: list[str]) -> Check:
    if not behind:
        return Check("migrations", "the tables are of this version")
    done = "`polar up` and `polar serve_rollout` bring it up to date as they start"
    return Check("migrations", f"the database lacks {', '.join(behind)}: {done}", "start one of them, then the workers")


def _clock(connection: Connection) -> Check:
    """Rows go by the database's clock whatever this one shows; logs and signatures of callbacks do not."""
    asked = time.time()
    theirs = float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    apart = (asked + time.time()) / 2 - theirs
    if abs(apart) <= SKEW_SECONDS:
        return Check("clock", f"{abs(apart):.1f} s from the database's")
    told = f"this machine is {apart:+.0f} s from the database"
    return Check("clock", told, "set both by NTP, for logs and signatures")


def _lanes(db: Session, settings: Settings) -> Iterator[Check]:
    rows, nodes = queries.lanes(db), {node.id: node for node in queries.nodes(db)}
    if not rows:
        yield Check("lanes", "no worker has served a lane yet", f"start one: celery -A polar worker -Q {settings.lane}")
    for lane in rows:
        silent = now() - lane.heartbeat_at
        alive = silent <= timedelta(seconds=LANE_ALIVE_SECONDS)
        found = lanes.state(lane, alive=alive, draining=nodes[lane.node_id].draining)
        told, do = {
            "gone": (
                f"no worker has served it for {silent.total_seconds():.0f} s",
                f"start one on node {lane.node_id}: celery -A polar worker -Q {lane.name}",
            ),
            "engine_down": (
                f"takes no sessions: {lane.engine_error}",
                "start the engine, and it goes on by itself",
            ),
            "draining": (f"node {lane.node_id} takes nothing new; POST /nodes/{lane.node_id}/resume ends that", None),
            "pulling": (f"takes sessions on node {lane.node_id}", None),
        }[found]
        yield Check(f"lane {lane.name}", told, do)


def _sweeper(db: Session) -> Check:
    last = lanes.last_swept(db)
    if last is not None and now() - last <= timedelta(seconds=SWEPT_SECONDS):
        return Check("beat", "sweeps")
    since = "never swept" if last is None else f"has not swept for {(now() - last).total_seconds():.0f} s"
    lost = "sessions of dead workers stay held, and no callback is sent"
    return Check("beat", f"{since}, so {lost}", "start it: celery -A polar worker -Q sweep -B -c 4")


def _runtimes(db: Session) -> Iterator[Check]:
    """What open tasks ask for and this machine lacks; another node may have it."""
    runtime = Task.spec["runtime"]
    name = func.coalesce(runtime["import_path"].as_string(), runtime["backend"].as_string())
    for backend, count in db.execute(select(name, func.count()).where(Task.ended_at.is_(None)).group_by(name)):
        reason = None if backend is None else lacking(backend)
        if reason is not None:
            told = f"{count} open tasks ask for it, and it is not here: {reason}"
            yield Check(f"runtime {backend}", told, "mend that, or see that a node which has it serves their lanes")
