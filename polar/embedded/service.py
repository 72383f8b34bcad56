"""One supervised program: what it is, how it is launched, when it is ready.

Leaves to others: restarting and stopping in order (supervisor.py), and what the programs are (the command line,
postgres.py, broker.py).
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.embedded.errors import EmbeddedError
from polar.embedded.process import Process, describe_exit, has_exited, reap, spawn

TAIL_LINES = 15
_READY_POLL_SECONDS = 0.03
_TAIL_BYTES = 16384


@dataclass(frozen=True)
class Service:
    """A program for the supervisor.

    `before` runs ahead of every start, restarts included. `restart=False` marks a program whose end is final.
    `death_signal` is what it gets when the supervisor itself is killed: choose one that makes it end its own children.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    ready: Callable[[], bool] | None = None
    restart: bool = True
    stop_signal: signal.Signals = signal.SIGTERM
    grace_seconds: float = 10.0
    ready_seconds: float = 30.0
    death_signal: signal.Signals = signal.SIGTERM
    as_user: int | None = None
    before: Callable[[], None] | None = None


def launch(service: Service) -> Process:
    """Start the service without waiting for it; the thread rule of process.spawn holds."""
    if service.before is not None:
        service.before()
    return spawn(
        service.argv,
        log_path=service.log_path,
        env=service.env,
        name=service.name,
        as_user=service.as_user,
        death_signal=service.death_signal,
    )


def wait_ready(service: Service, proc: Process, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Return once the service is ready, or once `interrupted` says to give up waiting.

    Raise EmbeddedError when it ends or takes longer than it may; ending `proc` is then the caller's part.
    """
    if service.ready is None:
        return
    deadline = time.monotonic() + service.ready_seconds
    while not interrupted():
        if has_exited(proc):
            raise failure(service.name, f"ended while starting ({describe_exit(reap(proc))})", service.log_path)
        if service.ready():
            return
        if time.monotonic() > deadline:
            raise failure(service.name, f"was not ready after {service.ready_seconds:g} s", service.log_path)
        time.sleep(_READY_POLL_SECONDS)


def failure(name: str, what: str, log_path: Path) -> EmbeddedError:
    """Return an error that shows the end of the log, where the program says why."""
    tail = log_tail(log_path)
    shown = "\n".join(f"    {line}" for line in tail) if tail else "    (empty)"
    return EmbeddedError(
        f"{name} {what}; put right what the end of its log {log_path} says, then start again:\n{shown}"
    )


def log_tail(log_path: Path, lines: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log, none when there is no log."""
    try:
        with log_path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return list(deque(text.splitlines(), maxlen=lines))
