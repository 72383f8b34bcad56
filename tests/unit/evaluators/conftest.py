"""Cases to evaluate: a real shell in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polar.evaluators.base import Case
from polar.runtimes.base import Limits
from polar.runtimes.local import LocalRuntime
from polar.spec import RuntimeSpec, parse_task

TASK = {"task_id": "t", "instruction": "do", "agent": {"harness": "codex"}}


@pytest.fixture
def runtimes(tmp_path: Path) -> Iterator[Callable[[str], LocalRuntime]]:
    """Makes started runtimes by name, and destroys them."""
    made: list[LocalRuntime] = []

    def make(name: str) -> LocalRuntime:
        runtime = LocalRuntime(RuntimeSpec(backend="local"), f"session-{name}", tmp_path / name)
        made.append(runtime)
        runtime.start(Limits(30))
        return runtime

    yield make
    for runtime in made:
        runtime.destroy()


@pytest.fixture
def case(tmp_path: Path, runtimes: Callable[[str], LocalRuntime]) -> Callable[..., Case]:
    """Makes cases; by default one with a runtime and time enough."""
    logs = tmp_path / "logs"
    logs.mkdir()

    def make(*, seconds: float | None = 60, env: dict[str, str] | None = None, **changes: Any) -> Case:
        values: dict[str, Any] = {
            "task": parse_task(TASK),
            "session_id": "s",
            "traces": [],
            "agent_exit": {"state": "completed"},
            "runtime": changes["runtime"] if "runtime" in changes else runtimes("agent"),
            "env": env or {},
            "limits": Limits(seconds),
            "logs": logs,
        }
        return Case(**(values | changes))

    return make
