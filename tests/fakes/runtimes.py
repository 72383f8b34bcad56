"""Specs of every runtime that this machine can run, for suites that are run over all of them."""

from __future__ import annotations

from typing import Any

import pytest

from polar import runtimes
from polar.spec import RuntimeSpec
from tests.fakes import docker_daemon


def why_not(backend: str) -> str | None:
    """Why this machine cannot run that runtime; Docker's daemon is the tests' own."""
    if backend == "docker":
        return docker_daemon.missing()
    return runtimes.runtime_class(RuntimeSpec(backend=backend)).unavailable()


HERE = [name for name in sorted(runtimes.RUNTIMES) if why_not(name) is None]
"""What suites over all runtimes are run over; one test says what is missing (test_every_runtime_runs_here)."""


def spec_of(backend: str, request: pytest.FixtureRequest, **asked: Any) -> RuntimeSpec:
    """A spec of that runtime with what it needs; the daemon it needs is started."""
    if backend == "docker":
        request.getfixturevalue("docker_host")
    image = {"docker": docker_daemon.IMAGE, "apptainer": "/"}.get(backend)
    return RuntimeSpec(backend=backend, **{"image": image, **asked})
