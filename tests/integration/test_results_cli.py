"""`polar results` against a real API: lines to a file, on from where it stopped, through a server that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine

from polar import keys, lifecycle, queries
from polar.cli import main
from polar.db import transaction
from polar.models import Consumer
from tests.fakes.tasks import task
from tests.integration.rig import free_port, process, until


@contextmanager
def api(database_url: str, port: int) -> Iterator[str]:
    """The API under gunicorn."""
    argv = [sys.executable, "-m", "gunicorn", "--no-control-socket", "workers.api:app", "-k", "gthread"]
    argv += ["--threads", "4", "-b", f"127.0.0.1:{port}", "--log-level", "error", "--graceful-timeout", "1"]
    url = f"http://127.0.0.1:{port}"
    with process(argv, f"{url}/health", {"POLAR_DATABASE_URL": database_url}):
        yield url


@pytest.fixture
def environment(database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key, and a home of this test's own."""
    with transaction(database) as db:
        monkeypatch.setenv("POLAR_API_KEY", keys.make(db, "test"))
    monkeypatch.setenv("POLAR_HOME", str(tmp_path))


def ended(database: Engine, task_id: str, count: int, **changes: object) -> list[str]:
    """A task with so many sessions, ended."""
    with transaction(database) as db:
        row = lifecycle.submit(db, task(task_id=task_id, num_samples=count, **changes))
        ids = [each.id for each in queries.sessions_of(db, row.id)]
    for session_id in ids:
        with transaction(database) as db:
            lifecycle.cancel(db, queries.session(db, session_id))
    return ids


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["results", *arguments], catch_exceptions=False)


def written(path: Path) -> list[str]:
    return [json.loads(line)["session_id"] for line in path.read_text().splitlines()] if path.exists() else []


def test_results_on_the_command_line(database: Engine, database_url: str, environment: None, tmp_path: Path) -> None:
    """Lines to stdout and what is said to stderr; a consumer goes on, filters filter, a torn line is mended."""
    first = ended(database, "a", 5, metadata={"group_id": "red"}, instruction="a\u2028b")
    file = tmp_path / "results.jsonl"
    with api(database_url, free_port()) as url:
        shown = run("--rollout-url", url, "--limit", "2", "--view", "summary")
        assert [json.loads(line)["session_id"] for line in shown.stdout.split("\n") if line] == first
        assert "5 results; go on with --after 5" in shown.stderr
        with_consumer = ("--rollout-url", url, "--consumer", "me", "--output", str(file), "--limit", "2")
        assert run(*with_consumer).exit_code == 0
        assert written(file) == first
        file.write_bytes(file.read_bytes() + b'{"session_id": "torn')
        second = ended(database, "b", 2)
        run(*with_consumer)
        assert written(file) == first + second
        assert run("--rollout-url", url, "--group", "red", "--view", "summary").stdout.count("\n") == 5
        assert run("--rollout-url", url, "--task-id", "b", "--after", "6").stdout.count("\n") == 1
        refused = run("--rollout-url", url, "--after", "99")
        assert refused.exit_code == 1 and "past the end" in refused.stderr
    with transaction(database) as db:
        assert db.get_one(Consumer, "me").cursor == 7
    gone = run("--rollout-url", url)
    assert gone.exit_code == 1 and "does not answer" in gone.stderr


def test_following_through_a_restart_and_a_kill(
    database: Engine, database_url: str, environment: None, tmp_path: Path
) -> None:
    """`--follow` survives an API that restarts; killed and started again, it loses nothing."""
    port, file = free_port(), tmp_path / "results.jsonl"
    argv = [sys.executable, "-m", "polar", "results", "--follow", "--consumer", "me", "--output", str(file)]
    argv += ["--rollout-url", f"http://127.0.0.1:{port}"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, env=dict(os.environ), stderr=subprocess.DEVNULL)

    expected: list[str] = []
    with api(database_url, port):
        child = start()
        expected += ended(database, "a", 3)
        until(lambda: written(file) == expected)
    expected += ended(database, "b", 3)
    with api(database_url, port):
        until(lambda: written(file) == expected, 30)
        child.kill()
        child.wait()
        expected += ended(database, "c", 3)
        child = start()
        until(lambda: set(written(file)) == set(expected), 30)
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 0
    assert len(written(file)) - len(expected) <= 3
