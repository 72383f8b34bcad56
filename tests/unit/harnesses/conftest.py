"""The workplace that presets are tried in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar import runtimes
from polar.harnesses.base import Connection, Workplace
from polar.runtimes.base import Limits
from polar.spec import RuntimeSpec


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A local runtime, and an instruction that looks like options and variables."""
    runtime = runtimes.create(RuntimeSpec(backend="local"), "s", tmp_path / "workspace")
    runtime.start(Limits())
    yield Workplace(
        runtime=runtime,
        connection=Connection("http://127.0.0.1:9/s/key", "sk-key", "org/policy"),
        instruction="-p --prompt are no options; it's $WHAT counts\n",
        env={"SESSION_ID": "s"},
        limits=Limits(30),
        logs=tmp_path / "logs",
        cache=tmp_path / "cache",
    )
    runtime.destroy()
