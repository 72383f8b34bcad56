"""What the embedded Postgres and the embedded broker have in common: a folder, a port, a password, start and stop.

Each server can run alone (`start`, `stop`) or under the supervisor (`service`). Leaves to others: the servers' own
settings, and keeping two `polar up` out of one folder (files.folder_lock).
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from polar.embedded.errors import EmbeddedError
from polar.embedded.files import read_or_make_secret
from polar.embedded.ports import HOST, free_port, require_free_port
from polar.embedded.process import Process, has_exited, processes_in, stop
from polar.embedded.service import Service, launch, wait_ready

_HOLDER_GRACE_SECONDS = 5.0


class EmbeddedServer(ABC):
    """A server in `data_dir`, on loopback unless told otherwise; its password and its log lie beside that folder.

    `start` must run in a thread that lives as long as the server should (see process.py).
    """

    name: ClassVar[str]
    program: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    grace_seconds: ClassVar[float] = 10.0

    def __init__(
        self, data_dir: Path, port: int | None = None, *, log_path: Path | None = None, host: str = HOST
    ) -> None:
        """`host`: the address to listen on; whoever reaches it and has the password gets in."""
        self.host = host
        self.data_dir = data_dir.absolute()
        self.port = free_port() if port is None else port
        self.log_path = log_path or self.data_dir.with_name(f"{self.data_dir.name}.log")
        self.password_is_new = False
        self._password: str | None = None
        self._proc: Process | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """The address for clients, password included."""

    @property
    @abstractmethod
    def argv(self) -> list[str]:
        """The command line, free of secrets: other users can read it."""

    @abstractmethod
    def ready(self) -> bool:
        """Say whether the server answers a client that has the password."""

    @abstractmethod
    def set_up(self) -> None:
        """Bring folder and configuration into the state that `argv` expects; runs before every start."""

    @property
    def env(self) -> dict[str, str]:
        """A fixed environment: variables like PGDATA or LC_ALL of the user's shell must not reach the servers."""
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}

    @property
    def as_user(self) -> int | None:
        """The uid to appear as, for a server that refuses to run as root."""
        return None

    @property
    def password(self) -> str:
        """The password, made at first use."""
        if self._password is None:
            path = self.data_dir.with_name(f"{self.data_dir.name}.password")
            self._password, self.password_is_new = read_or_make_secret(path)
        return self._password

    @property
    def pid(self) -> int | None:
        """The process that `start` started, while it lives."""
        return None if self._proc is None or has_exited(self._proc) else self._proc.pid

    def prepare(self) -> None:
        """Make sure that nobody else uses the folder or the port, then set up."""
        deadline = time.monotonic() + _HOLDER_GRACE_SECONDS
        # A server whose supervisor was killed a moment ago is still shutting down: that is worth waiting for.
        while holders := processes_in(self.data_dir, self.program):
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"{self.name} already runs in {self.data_dir} (process {min(holders)}): another `polar up` uses "
                    "this folder; stop it, or choose another data folder"
                )
            time.sleep(0.05)
        require_free_port(self.port, self.name)
        self.set_up()

    def service(self) -> Service:
        """Describe this server for the supervisor."""
        return Service(
            name=self.name,
            argv=self.argv,
            env=self.env,
            log_path=self.log_path,
            ready=self.ready,
            stop_signal=self.stop_signal,
            grace_seconds=self.grace_seconds,
            death_signal=self.stop_signal,
            as_user=self.as_user,
            before=self.prepare,
        )

    def start(self) -> None:
        """Start the server and return once it answers."""
        if self.pid is not None:
            return
        service = self.service()
        self._proc = launch(service)
        try:
            wait_ready(service, self._proc)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server; does nothing when it does not run."""
        if self._proc is not None:
            stop(self._proc, self.grace_seconds, stop_signal=self.stop_signal)
            self._proc = None
