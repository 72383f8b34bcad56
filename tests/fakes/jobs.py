"""Claimed sessions, to put into tests of the stages."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from polar import lanes, lifecycle, placement, queries
from polar.db import transaction
from polar.lifecycle import STAGES, Stage
from polar.settings import Settings
from polar.stages import Job
from tests.fakes.tasks import task, topology


def claimed(database: Engine, home: Path, stage: Stage = Stage.PREWARM, number: int = 1, **changes: Any) -> list[Job]:
    """As many sessions of a new task, claimed in `stage`, as a worker has them."""
    node, lane = topology(max_execute=64, ready_buffer=64).lane("gpu0")
    request = task(num_samples=number, **changes)
    with transaction(database) as db:
        lanes.beat(db, node, lane)
        row = lifecycle.submit(db, request)
        placement.place(db, "gpu0")
        ids = [session.id for session in queries.sessions_of(db, row.id)]
    settings = Settings(home=str(home))
    return [
        Job(_claim(database, each, stage), request, database, settings, node, lane, threading.Event()) for each in ids
    ]


def _claim(database: Engine, session_id: str, stage: Stage) -> Any:
    for each in STAGES:
        with transaction(database) as db:
            session = lifecycle.claim(db, session_id, each, "worker-1")
            assert session is not None
            if each is stage:
                return session
            lifecycle.advance(db, session)
    raise AssertionError(stage)
