"""`polar up` on servers that somebody else runs: it embeds nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, select

from polar.embedded import free_port
from polar.models import Lane
from tests.integration.rig import process, until

pytestmark = pytest.mark.e2e
STAGES = ("prewarm", "execute", "reconstruct", "evaluate")


@pytest.mark.parametrize(
    ("asked", "served"), [("gpu0", {f"gpu0.{stage}" for stage in STAGES}), ("gpu0.execute", {"gpu0.execute"})]
)
def test_a_worker_serves_the_lane_or_the_stage_it_was_given(
    database_url: str, broker_url: str, tmp_path: Path, asked: str, served: set[str]
) -> None:
    """`celery -A polar worker -Q gpu0` consumes the lane's four queues, `-Q gpu0.execute` that one alone."""
    env = {**os.environ, "POLAR_DATABASE_URL": database_url, "POLAR_BROKER_URL": broker_url}
    output = tmp_path / "worker.log"
    with output.open("wb") as log:
        argv = [sys.executable, "-m", "celery", "-A", "polar", "worker", "-Q", asked, "-c", "2"]
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while "[queues]" not in output.read_text() or served - _queues(output):
            assert process.poll() is None and time.monotonic() < end, output.read_text()
            time.sleep(0.2)
        assert _queues(output) == served
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def _queues(output: Path) -> set[str]:
    """The queues of a worker's banner."""
    return set(re.findall(r"\.> (\S+)\s+exchange=", output.read_text()))


def test_a_worker_finds_out_by_itself_whether_its_engine_is_there(
    database_url: str, database: Engine, broker_url: str, tmp_path: Path
) -> None:
    """Started before its engine, a worker writes down that the lane's engine is away, and that it came."""
    port = free_port()
    lane = {"name": "gpu0", "engine": {"base_url": f"http://127.0.0.1:{port}"}}
    gateway = {"nodes": [{"id": "local", "lanes": [lane]}]}
    (tmp_path / "topology.yaml").write_text(json.dumps({"gateway": gateway}))
    env = {**os.environ, "POLAR_DATABASE_URL": database_url, "POLAR_BROKER_URL": broker_url}
    env |= {"POLAR_TOPOLOGY": str(tmp_path / "topology.yaml"), "POLAR_HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "celery", "-A", "polar", "worker", "-Q", "gpu0", "-c", "2"]
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    try:
        until(lambda: _engine_error(database).startswith("no engine answers"), seconds=60)
        argv = [sys.executable, "-m", "polar.tiny_engine", "--port", str(port)]
        with process(argv, f"http://127.0.0.1:{port}/model_info"):
            until(lambda: _engine_error(database) == "", seconds=60)
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0


def _engine_error(database: Engine) -> str:
    """What the lane's row says of its engine; `no row` before there is one."""
    with database.connect() as db:
        found = db.execute(select(Lane.engine_error)).first()
    return "no row" if found is None else found[0] or ""


def test_named_servers_are_used_and_nothing_is_embedded(database_url: str, broker_url: str, tmp_path: Path) -> None:
    """With both URLs set, Polar comes up, a lane is alive, and no server's data lies in the home folder."""
    home, port = tmp_path / "home", free_port()
    env = {**os.environ, "POLAR_DATABASE_URL": database_url, "POLAR_BROKER_URL": broker_url}
    flags = ["--home", str(home), "--port", str(port), "--proxy-port", str(free_port())]
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "polar", "up", *flags], env=env, stdout=log, stderr=log)
    try:
        end, ready = time.monotonic() + 90, False
        while not ready:
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "up.log").read_text()
            time.sleep(0.2)
            try:
                ready = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).is_success
            except httpx.TransportError:
                continue
        assert not [path for path in home.iterdir() if path.name.startswith(("postgres", "broker"))]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 0
