"""The command line as a shell and a reader meet it: version, help, completion of commands and of task names."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from werkzeug.serving import make_server

from polar import __version__, keys
from polar.api import create_app
from polar.db import transaction
from polar.remedies import REMEDIES
from polar.settings import Settings
from tests.admin.rows import open_task
from tests.fakes.dispatcher import FakeDispatcher

PROGRAM = str(Path(sys.executable).parent / "polar")


def polar(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The installed program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
    return subprocess.run([PROGRAM, *argv], capture_output=True, text=True, timeout=120, env=kept | env)


def completed(words: str, **env: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    number = str(len(words.split(" ")) - 1)
    done = polar(_POLAR_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=number, **env)
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.fixture
def served(database: Engine, database_url: str) -> Iterator[dict[str, str]]:
    """The API over HTTP; the variables that lead a command there."""
    with transaction(database) as db:
        key = keys.make(db, "test")
    open_task(database, "first-task")
    server = make_server("127.0.0.1", 0, create_app(Settings(database_url=database_url), FakeDispatcher()))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"POLAR_URL": f"http://127.0.0.1:{server.server_port}", "POLAR_API_KEY": key}
    server.shutdown()


def test_version_and_help() -> None:
    """`polar --version` names the version; `polar --help` ends with an example and the way to completion."""
    assert polar("--version").stdout.split()[-1] == __version__
    said = polar("--help").stdout
    assert "Example: polar submit" in said and "_POLAR_COMPLETE=bash_source polar" in said


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell: str) -> None:
    """The script that the help names, for the program's own name."""
    done = polar(_POLAR_COMPLETE=f"{shell}_source")
    assert done.returncode == 0 and "_polar_completion" in done.stdout, done.stderr


def test_commands_and_options_are_completed() -> None:
    """Names of commands, and of a command's options."""
    assert completed("polar ser") == ["serve_rollout", "serve_gateway", "serve_engine"]
    assert "--num-samples" in completed("polar submit --num")


def test_task_names_are_completed(served: dict[str, str]) -> None:
    """From the API that the variables name; where nobody answers, nothing is offered and nothing is said."""
    assert completed("polar status fir", **served) == ["first-task"]
    assert completed("polar cancel sec", **served) == []
    assert completed("polar status fir", POLAR_URL="http://127.0.0.1:9") == []


def test_a_refusal_ends_with_what_to_do(served: dict[str, str]) -> None:
    """Whoever is refused is told the next step, without a traceback."""
    refused = polar("status", **served | {"POLAR_API_KEY": "polar-wrong"})
    assert refused.returncode == 1 and "/admin/keys" in refused.stderr and "Traceback" not in refused.stderr
    away = polar("status", POLAR_URL="http://127.0.0.1:9")
    assert away.returncode == 1 and "polar up" in away.stderr
    assert all(remedy.do for remedy in REMEDIES.values())
