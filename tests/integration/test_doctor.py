"""`polar doctor` on machines where something is wrong: it names what, and says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import libfaketime
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, text

from polar import lanes, lifecycle
from polar.cli import main
from polar.cli.doctor import disk
from polar.db import transaction
from polar.sweep import sweep
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task, topology

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home, and no settings but a test's own."""
    for name in [name for name in os.environ if name.startswith("POLAR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("POLAR_HOME", str(tmp_path))


def examined(*arguments: str) -> tuple[int, dict[str, str]]:
    """Exit code, and what was said of each thing, with `bad` or `ok` before it."""
    found = CliRunner().invoke(main, ["doctor", *arguments])
    return found.exit_code, read(found.output)


def read(output: str) -> dict[str, str]:
    """What was said of each thing; names and words stand in columns."""
    return {line[5:26].strip(): f"{line[:5].strip()}: {line[26:]}" for line in output.splitlines()}


def test_servers_that_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named with the setting to look at, and no password is shown."""
    monkeypatch.setenv("POLAR_DATABASE_URL", "postgresql://polar:hush-hush@127.0.0.1:9/polar")
    monkeypatch.setenv("POLAR_BROKER_URL", "redis://:hush-hush@127.0.0.1:9/0")
    found = CliRunner().invoke(main, ["doctor"])
    said = read(found.output)
    assert found.exit_code == 1
    assert said["postgres"].startswith("bad") and "POLAR_DATABASE_URL" in said["postgres"]
    assert said["broker"].startswith("bad") and "POLAR_BROKER_URL" in said["broker"]
    assert "hush-hush" not in found.output and "Traceback" not in found.output


def test_tables_of_another_version(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that was never migrated lacks every version, and what brings it up to date is said."""
    monkeypatch.setenv("POLAR_DATABASE_URL", postgres)
    code, said = examined()
    assert code == 1
    assert said["migrations"].startswith("bad: the database lacks 0001, 0002") and "polar up" in said["migrations"]


def test_a_fleet_that_does_not_work(database: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker yet, then one, then one that fell silent; and the same of the sweeper."""
    monkeypatch.setenv("POLAR_DATABASE_URL", database_url)
    code, said = examined()
    assert code == 1
    assert said["migrations"].startswith("ok") and said["clock"].startswith("ok")
    assert said["lanes"].startswith("bad: no worker") and "celery -A polar worker -Q gpu0" in said["lanes"]
    assert said["beat"].startswith("bad: never swept") and "-Q sweep -B" in said["beat"]
    node, lane = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, lane)
    sweep(database, FakeDispatcher())
    _, said = examined()
    assert (said["lane gpu0"], said["beat"]) == ("ok: takes sessions on node node-1", "ok: sweeps")
    with database.begin() as db:
        db.execute(text("UPDATE lanes SET heartbeat_at = now() - interval '90 s'"))
        db.execute(text("UPDATE beats SET at = now() - interval '90 s'"))
    code, said = examined()
    assert code == 1
    assert "no worker has served it for 9" in said["lane gpu0"] and "-Q gpu0" in said["lane gpu0"]
    assert "has not swept for 9" in said["beat"]


def test_what_open_tasks_ask_for_and_a_wrong_clock(database: Engine, database_url: str, tmp_path: Path) -> None:
    """A sandbox program that is missing, for a task that needs it; and a clock an hour ahead."""
    with transaction(database) as db:
        lifecycle.submit(db, task(runtime={"backend": "bubblewrap"}))
    library = next(Path(libfaketime.__file__).parent.rglob("libfaketime.so.1"))
    env = {"PATH": "/nowhere", "POLAR_HOME": str(tmp_path), "POLAR_DATABASE_URL": database_url}
    env |= {"LD_PRELOAD": str(library), "FAKETIME": "+3600", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    done = subprocess.run([sys.executable, "-m", "polar", "doctor"], env=env, capture_output=True, text=True)
    said = read(done.stdout)
    assert done.returncode == 1, done.stderr
    assert "1 open tasks ask for it, and it is not here" in said["runtime bubblewrap"]
    assert said["clock"].startswith("bad: this machine is +3600 s") and "NTP" in said["clock"]


def test_addresses_that_do_not_answer(tmp_path: Path) -> None:
    """API, proxy and engine of the topology, each with what to start; an engine's password is not shown."""
    path = tmp_path / "topology.yaml"
    path.write_text(
        "rollout: {port: 9}\ngateway: {nodes: [{id: n, port: 9, default_runtime: {backend: 'nowhere:Nothing'}, "
        "lanes: [{name: a, engine: {base_url: 'http://me:hush-hush@127.0.0.1:9'}}]}]}"
    )
    code, said = examined("-c", str(path))
    assert code == 1
    assert said["api"].startswith("bad") and "polar up" in said["api"]
    assert said["proxy of n"].startswith("bad") and "polar serve_gateway" in said["proxy of n"]
    assert said["engine of a"].startswith("bad: no engine answers at http://***@127.0.0.1:9")
    assert "hush-hush" not in str(said)
    assert "default_runtime is nowhere:Nothing" in said["runtime of n"] and "give it another" in said["runtime of n"]
    path.write_text("gateway: {nodes: [{id: n, ports: 9}]}")
    assert "docs/reference/topology.md" in examined("-c", str(path))[1]["topology"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a small disk takes the right to mount one: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_nearly_full(small_disk: Path) -> None:
    """It says how much is free, where, and which setting moves it."""
    name, told, do = disk(small_disk)
    assert name == "disk" and do is not None and "POLAR_HOME" in do
    assert str(small_disk) in told and "0.0 of 0.0 GiB" in told
