"""Runtimes by name: the one place that knows which there are.

`check` is asked when a task is submitted and needs nothing of the node; whether a node can run a runtime is
`Runtime.unavailable`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polar.errors import SpecError
from polar.registry import load
from polar.runtimes.base import CANNOT_KEEP, ExecResult, Limits, Orphan, Runtime
from polar.spec import RuntimeSpec

RUNTIMES = {
    "local": "polar.runtimes.local:LocalRuntime",
    "bubblewrap": "polar.runtimes.bubblewrap:BubblewrapRuntime",
    "docker": "polar.runtimes.docker:DockerRuntime",
    "apptainer": "polar.runtimes.apptainer:ApptainerRuntime",
}


def runtime_class(spec: RuntimeSpec) -> type[Runtime]:
    """The class that `spec` names. Raises SpecError."""
    if spec.import_path is not None:
        return load("runtime.import_path", RUNTIMES, spec.import_path, Runtime)  # type: ignore[type-abstract]
    return load("runtime.backend", RUNTIMES, spec.backend, Runtime)  # type: ignore[type-abstract]


def check(spec: RuntimeSpec) -> None:
    """Raise SpecError, naming each field, if the runtime of `spec` cannot give what `spec` asks."""
    problems = runtime_class(spec).problems(spec)
    if problems:
        errors = [(f"runtime.{field}", reason) for field, reason in problems]
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors), errors=errors)


def create(spec: RuntimeSpec, session_id: str, workspace: Path) -> Runtime:
    """A runtime that is not started yet."""
    return runtime_class(spec)(spec, session_id, workspace)


def attach(handle: dict[str, Any]) -> Runtime:
    """The runtime that a handle names, whoever made it."""
    return runtime_class(RuntimeSpec.model_validate(handle["spec"])).attach(handle)


__all__ = [
    "CANNOT_KEEP",
    "RUNTIMES",
    "ExecResult",
    "Orphan",
    "Limits",
    "Runtime",
    "attach",
    "check",
    "create",
    "runtime_class",
]
