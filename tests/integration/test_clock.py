"""A node whose wall clock is wrong, on a real Postgres: what it writes and reads is by the database's clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import libfaketime
import pytest
from sqlalchemy import Engine, text

from polar import lanes, lifecycle
from polar.db import transaction
from polar.lifecycle import LEASE_SECONDS, Stage
from tests.fakes.tasks import task, topology

pytestmark = pytest.mark.integration
ELSEWHERE = """
import sys, time
from polar import lanes, lifecycle, sweep
from polar.db import connect, transaction
from polar.lifecycle import Stage
database = connect(sys.argv[1], pool_size=1)
print("here", flush=True)
sys.stdin.readline()
with transaction(database) as db:
    print(len(sweep.expired(db)), len(sweep.overdue(db)), len(lanes.alive(db)))
    assert lifecycle.claim(db, sys.argv[2], Stage.PREWARM, "elsewhere")
print(round(time.time() - float(sys.argv[3])))
"""


@pytest.mark.parametrize("offset", [3600, -3600])
def test_a_node_with_a_wrong_clock_does_no_harm(database: Engine, database_url: str, offset: int) -> None:
    """It frees nobody's lease, ends nobody for being late, sees who is alive, and takes a lease that is right."""
    node, lane = topology().lane("gpu0")
    with transaction(database) as db:
        first, second = (each.id for each in lifecycle.submit(db, task(num_samples=2)).sessions)
    library = next(Path(libfaketime.__file__).parent.rglob("libfaketime.so.1"))
    env = {**os.environ, "LD_PRELOAD": str(library), "FAKETIME": f"{offset:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    argv = [sys.executable, "-c", ELSEWHERE, database_url, second, str(time.time())]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "here\n"
        with transaction(database) as db:
            lanes.beat(db, node, lane)
            assert lifecycle.claim(db, first, Stage.PREWARM, "here")
        said = other.communicate("\n")[0].split()
    assert said[:3] == ["0", "0", "1"]
    assert abs(int(said[3]) - offset) < 60, "its clock was wrong indeed"
    with database.connect() as db:
        left = text("SELECT extract(epoch FROM lease_until - now()) FROM sessions WHERE id = :id")
        assert 0 < db.execute(left, {"id": second}).scalar_one() <= LEASE_SECONDS
