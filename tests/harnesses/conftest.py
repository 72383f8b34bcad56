"""A real program, a real sandbox, the real proxy, and a model that says what its script says."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar import harnesses, runtimes
from polar.bodies import request_of
from polar.errors import HarnessError
from polar.harnesses import AgentExit, Connection, Workplace
from polar.models import Completion
from polar.runtimes import Limits
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.spec import AgentSpec, RuntimeSpec
from tests.harnesses import table
from tests.harnesses.cases import Case
from tests.integration import rig

INSTRUCTION = """Create a file hello.txt in the current folder that holds the word "hello".
It's the $WORD that counts, not `the form`; no {{placeholders}} \\ and no <tags>. Then say "I'm done"."""
UNREACHABLE = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH|dns error|error sending request|Failed to fetch|"
    r"Connection refused|network (?:is|connectivity)|unreachable",
    re.IGNORECASE,
)
"""How npm, uv and pip say that they cannot reach their index."""
SEES_NO_PROMPT = "no prompt has this in it: \N{SNOWMAN}"


@dataclass(frozen=True)
class Run:
    """What came of one run."""

    ended: AgentExit
    rows: list[Completion]
    content: str | None
    """Of hello.txt."""
    left: list[str]
    """What is in the working folder."""
    bodies: dict[str, Any]
    """Of the calls, by id."""
    logs: Path

    def asked(self, row: Completion) -> Any:
        """The body of a call."""
        return self.bodies[row.id]

    def said(self) -> str:
        """The end of what the program printed, and its calls: for the message of a failed assertion."""
        calls = [
            (row.role, row.parent_reason, row.outcome, row.error, row.parsed.get("role_reason")) for row in self.rows
        ]
        prints = [path.read_text(errors="replace")[-1500:] for path in sorted(self.logs.glob("agent.*"))]
        return "\n".join([repr(self.ended), *map(repr, calls), *prints, str(self.logs)])


@pytest.fixture
def run(
    database: Engine, database_url: str, tmp_path: Path, pytestconfig: pytest.Config
) -> Iterator[Callable[..., Run]]:
    """Runs a case; `refuse`: the engine refuses every call; `spec`: more of the agent's; `files`: put into the runtime.

    Skips where the program cannot be fetched."""
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("harnesses")
    with ExitStack() as closing:

        def one(
            case: Case,
            *,
            refuse: bool = False,
            spec: dict[str, Any] | None = None,
            files: dict[str, str] | None = None,
        ) -> Run:
            runtime = closing.enter_context(_sandbox(tmp_path))
            for path, text in (files or {}).items():
                (tmp_path / "file").write_text(text)
                runtime.upload(tmp_path / "file", path)
            engine = closing.enter_context(_scripted(_script(case, runtime.workdir, refuse), tmp_path / "script.json"))
            agent = {"harness": case.harness, "model_name": "policy", "settings": dict(case.settings), **(spec or {})}
            rig.open_session(database, engine, agent=agent)
            place = Workplace(
                runtime=runtime,
                connection=Connection(runtime.reach(closing.enter_context(rig.serve(database_url))), rig.KEY, "policy"),
                instruction=INSTRUCTION,
                env={"SESSION_ID": "s"},
                limits=Limits(case.seconds),
                logs=tmp_path / "logs",
                cache=cache,
            )
            try:
                ended = _play(harnesses.create(AgentSpec.model_validate(agent)), place)
            except HarnessError as error:
                if error.code != "install_failed" or not UNREACHABLE.search(error.message):
                    raise
                table.FACTS[case.harness].not_run = "what it is installed from cannot be reached here"
                pytest.skip(f"what it is installed from cannot be reached: {error.message[:300]}")
            made = tmp_path / "hello.txt"
            if runtime.exec("test -e hello.txt", limits=Limits(20)).ok:
                runtime.download("hello.txt", made)
            content = made.read_text() if made.exists() else None
            left = runtime.exec("ls -A", limits=Limits(20)).stdout.split()
            rows = rig.completions(database)
            with Session(database) as db:
                bodies = {row.id: json.loads(request_of(db, row.id)) for row in rows}
            return Run(ended, rows, content, left, bodies, place.logs)

        yield one


def _play(harness: harnesses.Harness, place: Workplace) -> AgentExit:
    # Fetching packages is not what is timed here.
    harness.setup(replace(place, limits=Limits(900)))
    ended = harness.run(replace(place, limits=Limits(place.limits.seconds)))
    place.runtime.kill_all()
    harness.collect(place)
    return ended


@contextmanager
def _sandbox(folder: Path) -> Iterator[runtimes.Runtime]:
    """Without internet where this machine can make one; else a plain folder."""
    if BubblewrapRuntime.unavailable() is None:
        spec = RuntimeSpec(backend="bubblewrap", network="none")
    else:
        spec = RuntimeSpec(backend="local")
    runtime = runtimes.create(spec, "s", folder / "workspace")
    try:
        runtime.start(Limits(60))
        yield runtime
    finally:
        runtime.destroy()


@contextmanager
def _scripted(script: dict[str, Any], path: Path) -> Iterator[str]:
    """The scripted engine with this script; its address."""
    path.write_text(json.dumps(script))
    url = f"http://127.0.0.1:{(port := rig.free_port())}"
    argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(path), "--port", str(port)]
    with rig.process(argv, f"{url}/model_info"):
        yield url


def _script(case: Case, workdir: str, refuse: bool) -> dict[str, Any]:
    if case.script is not None:
        return dict(case.script)
    if refuse:
        return {"scripts": [{"match": SEES_NO_PROMPT, "answers": [{"content": "never"}]}]}
    arguments = {
        name: value.replace("{workdir}", workdir) if isinstance(value, str) else value
        for name, value in case.arguments.items()
    }
    first = {"content": "I make the file.", "tool_calls": [{"name": case.tool, "arguments": arguments}]}
    asides = [{"match": piece, "answers": [answer]} for piece, answer in case.side.items()]
    return {"scripts": [*asides, {"answers": [first, dict(case.last)]}]}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A whole run of the suite writes its table into the documentation."""
    if os.environ.get("POLAR_TEST_HARNESSES") == "all" and table.FACTS:
        table.write(session.config.rootpath / "docs" / "harnesses.md")
