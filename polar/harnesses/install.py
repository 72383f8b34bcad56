"""Installing a Python program once per node, for harnesses that run from the node's cache.

Sessions that need it at the same time wait for the first. What is installed, and how it is run, is the member's.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polar.errors import HarnessError
from polar.runtimes import environment, process
from polar.runtimes.base import Limits

_POLL_SECONDS = 0.1
_SAID = 2000


def python_program(requirements: Sequence[str], folder: Path, *, limits: Limits, log: Path) -> Path:
    """The virtual environment `folder` with `requirements` in it, made if it is not there. Raises HarnessError."""
    ready = folder / ".ready"
    if ready.is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock"), limits, requirements[0]):
        if not ready.is_file():
            # Left by an installation that was cut off. It is made in its place and not renamed into it, because
            # the scripts of a virtual environment hold its path.
            shutil.rmtree(folder, ignore_errors=True)
            for number, argv in enumerate(_steps(requirements, folder)):
                _do(argv, requirements[0], limits, log.with_name(f"{log.name}.{number}"))
            ready.touch()
    return folder


def _steps(requirements: Sequence[str], folder: Path) -> list[list[str]]:
    python = str(folder / "bin" / "python")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is not None:
        # Compiled now, because sandboxes see the environment read-only and would compile at every start.
        install = [uv, "pip", "install", "--compile-bytecode", "--python", python, *requirements]
        return [[uv, "venv", "--python", sys.executable, str(folder)], install]
    return [[sys.executable, "-m", "venv", str(folder)], [python, "-m", "pip", "install", *requirements]]


def _do(argv: list[str], what: str, limits: Limits, log: Path) -> None:
    command = process.Command(argv=argv, env=environment.for_installers(), cwd=log.parent)
    log.parent.mkdir(parents=True, exist_ok=True)
    result = process.run(command, limits=limits, scratch=log.parent, log=log)
    if not result.ok:
        raise HarnessError(
            f"cannot install {what}: {Path(argv[0]).name} {result.summary(_SAID)}; where the node cannot reach a "
            "package index, install it in the runtime and set agent.settings.install to false",
            code="install_failed",
        )


@contextmanager
def locked(path: Path, limits: Limits, what: str) -> Iterator[None]:
    """Hold the lock file, waiting within the limits. The kernel lets go of it if we die."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if limits.left() == 0 or limits.cancelled.is_set():
                    said = f"another session is still installing {what}, and this one has no time left"
                    raise HarnessError(said, code="install_failed") from None
                time.sleep(_POLL_SECONDS)
        yield
