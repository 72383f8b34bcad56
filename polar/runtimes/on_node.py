"""What the runtimes share whose commands are processes of the node itself.

A member says where its paths are on the node and what the command line is; the life of a workspace, the
running, the marking and the ending of its processes, and copying are here.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from polar.errors import RuntimeFault
from polar.runtimes import environment, files, process, tree
from polar.runtimes.base import ExecResult, Limits, Runtime
from polar.spec import RuntimeSpec

SESSION_FOLDER = "/polar/session"
"""Where a session's folder is in every runtime that has paths of its own."""


class NodeRuntime(Runtime):
    """memory_mb holds for each process by itself (RLIMIT_DATA); cpus is a set of processors (affinity)."""

    LIMITS_RESOURCES = True
    COPIES_PREPARED = True
    TAKES_IMAGE = False
    NETWORKS: ClassVar[frozenset[str] | None] = frozenset({"host"})
    KWARGS: ClassVar[frozenset[str] | None] = frozenset()

    def __init__(self, spec: RuntimeSpec, session_id: str, workspace: Path) -> None:
        super().__init__(spec, session_id, workspace.resolve())
        # From the path alone, so that whoever attaches to the handle looks for the same marker.
        self._mark = hashlib.sha256(str(self.workspace).encode()).hexdigest()[:32]

    @property
    @abstractmethod
    def _temporary(self) -> str:
        """TMPDIR, a path inside."""

    @abstractmethod
    def _on_node(self, path: str) -> Path:
        """Where a path inside is on the node, links followed. Raises RuntimeFault if copying there is refused."""

    @abstractmethod
    def _started(self, command: str, cwd: str) -> AbstractContextManager[Sequence[str]]:
        """The command line that runs a shell command, and whatever must be there while it runs."""

    @property
    @abstractmethod
    def _state(self) -> tuple[str, ...]:
        """The folders of the workspace that hold what a session writes."""

    @property
    def _output(self) -> Path:
        return self.workspace / "output"

    def start(self, limits: Limits) -> None:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            for folder in (self.workdir, self.home, self._temporary):
                self._on_node(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeFault(f"cannot make the workspace {self.workspace}: {error}") from error

    def exec(
        self,
        command: str,
        *,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        log: Path | None = None,
    ) -> ExecResult:
        variables = environment.clean(self.home, self._temporary) | dict(env or {})
        with self._started(command, cwd or self.workdir) as argv:
            return process.run(
                process.Command(
                    argv=argv,
                    env=variables | {tree.RUNTIME_MARK: self._mark},
                    cwd=self.workspace,
                    setup=environment.limiter(self.spec, self.session_id),
                ),
                limits=limits,
                scratch=self._output,
                log=log,
            )

    def upload(self, source: Path, target: str) -> None:
        files.upload(source, self._on_node(target), into=target.endswith("/"))

    def download(self, source: str, target: Path) -> None:
        files.download(self._on_node(source), target, source)

    def freeze(self, store: Path) -> None:
        for folder in self._state:
            files.clone(self.workspace / folder, store / folder)

    def start_from(self, store: Path, limits: Limits) -> None:
        for folder in self._state:
            files.clone(store / folder, self.workspace / folder)
        self.start(limits)

    def kill_all(self) -> None:
        tree.end(lambda: tree.of_runtime(self._mark, self.workspace))

    def destroy(self) -> None:
        self.kill_all()
        files.remove(self.workspace)
