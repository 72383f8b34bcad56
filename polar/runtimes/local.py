"""A folder and a process group: no isolation at all, for development and trusted tasks.

The agent runs as the worker's own user and can read what that user can. It is given its own home, its own
temporary folder, and none of the worker's variables. Copying keeps to the workspace; commands need not.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polar.runtimes import files, process
from polar.runtimes.on_node import SESSION_FOLDER, NodeRuntime
from polar.spec import RuntimeSpec


class LocalRuntime(NodeRuntime):
    """Commands run on the node itself, in a folder of their own; /polar/session stands for that folder."""

    name = "local"

    @classmethod
    def problems(cls, spec: RuntimeSpec) -> list[tuple[str, str]]:
        found = super().problems(spec)
        if spec.workdir and _below_session(spec.workdir) is None:
            found.append(("workdir", f"runtime {cls.name!r}: must be relative, or below {SESSION_FOLDER}"))
        return found

    @property
    def workdir(self) -> str:
        return str(self._folder / (_below_session(self.spec.workdir or "") or ""))

    @property
    def home(self) -> str:
        return str(self.workspace / "home")

    @property
    def _temporary(self) -> str:
        return str(self.workspace / "tmp")

    @property
    def _state(self) -> tuple[str, ...]:
        return ("work", "home", "tmp")

    @property
    def _folder(self) -> Path:
        return self.workspace / "work"

    def expose(self, path: Path) -> str:
        return str(path.absolute())

    @contextmanager
    def _started(self, command: str, cwd: str) -> Iterator[Sequence[str]]:
        yield process.shell_argv(command, str(self._named(cwd)))

    def _on_node(self, path: str) -> Path:
        return files.resolve_within(self.workspace, self._named(path))

    def _named(self, path: str) -> Path:
        below = _below_session(path) if posixpath.isabs(path) else None
        return Path(self.workdir) / path if below is None else self._folder / below


def _below_session(path: str) -> str | None:
    """`path` relative to the session's folder; None if it is an absolute path elsewhere."""
    if not posixpath.isabs(path):
        return path
    normal = posixpath.normpath(path)
    if normal == SESSION_FOLDER:
        return ""
    return normal.removeprefix(f"{SESSION_FOLDER}/") if normal.startswith(f"{SESSION_FOLDER}/") else None
