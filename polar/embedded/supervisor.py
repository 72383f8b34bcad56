"""The supervisor behind `polar up`: start in order, restart what dies, stop in reverse order, leave nothing behind.

Leaves to others: which services there are (the command line), and how one is launched and found ready (service.py).
It must run in a thread that lives as long as the services (see process.py); only in the main thread does it handle
signals.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from polar.embedded.errors import EmbeddedError
from polar.embedded.process import Process, describe_exit, has_exited, reap, stop
from polar.embedded.service import Service, launch, wait_ready

logger = logging.getLogger("polar.embedded")

FIRST_DELAY_SECONDS = 0.5
LAST_DELAY_SECONDS = 10.0
# A service that lived this long was healthy: its next death is a new story, not one more failure in a row.
HEALTHY_SECONDS = 30.0
_WAIT_SECONDS = 0.5


@dataclass
class _Child:
    service: Service
    proc: Process | None = None
    started_at: float = 0.0
    delay: float = FIRST_DELAY_SECONDS
    retry_at: float | None = None


class Supervisor:
    """Runs `services`, in their order."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._children = [_Child(service) for service in services]
        self._signals = 0
        self._stop_event: threading.Event = threading.Event()

    def pids(self) -> dict[str, int]:
        """Return the processes that run now, by service name."""
        return {child.service.name: child.proc.pid for child in self._children if child.proc is not None}

    def start(self) -> None:
        """Start every service, each once the one before is ready; when one fails, stop all and raise EmbeddedError.

        A stop that is asked for meanwhile ends the waiting; the caller then stops.
        """
        try:
            for child in self._children:
                if self._stopping():
                    return
                child.proc = launch(child.service)
                child.started_at = time.monotonic()
                wait_ready(child.service, child.proc, self._stopping)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop every service in reverse order."""
        for child in reversed(self._children):
            if child.proc is not None:
                service = child.service
                stop(child.proc, service.grace_seconds, stop_signal=service.stop_signal, hurry=self._hurried)
            child.proc, child.retry_at = None, None

    def run_forever(
        self, stop_event: threading.Event | None = None, on_ready: Callable[[], None] | None = None
    ) -> None:
        """Start, call `on_ready`, then keep the services up until `stop_event`, SIGINT or SIGTERM; then stop all.

        A second signal ends every grace period.
        """
        if stop_event is not None:
            self._stop_event = stop_event
        with self._signal_handlers() as wake:
            self.start()
            try:
                if on_ready is not None and not self._stopping():
                    on_ready()
                while not self._stopping():
                    self._watch()
                    select.select([wake], [], [], self._next_wait())
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
            finally:
                self.stop()

    def _stopping(self) -> bool:
        return self._signals > 0 or self._stop_event.is_set()

    def _hurried(self) -> bool:
        return self._signals > 1

    def _watch(self) -> None:
        """Note the deaths since the last look and start what is due."""
        for child in self._children:
            if child.proc is not None and has_exited(child.proc):
                self._note_death(child, child.proc)
            if child.retry_at is not None and time.monotonic() >= child.retry_at:
                self._relaunch(child)

    def _note_death(self, child: _Child, proc: Process) -> None:
        ended = describe_exit(reap(proc))
        child.proc = None
        if not child.service.restart:
            logger.warning("%s ended (%s); it is not restarted", child.service.name, ended)
            return
        if time.monotonic() - child.started_at >= HEALTHY_SECONDS:
            child.delay = FIRST_DELAY_SECONDS
        self._retry_later(child, f"ended ({ended})")

    def _retry_later(self, child: _Child, what: str) -> None:
        name, log_path = child.service.name, child.service.log_path
        logger.warning("%s %s; starting it again in %.1f s; its log: %s", name, what, child.delay, log_path)
        child.retry_at = time.monotonic() + child.delay
        child.delay = min(child.delay * 2, LAST_DELAY_SECONDS)

    def _relaunch(self, child: _Child) -> None:
        child.retry_at = None
        try:
            child.proc = launch(child.service)
        except (EmbeddedError, OSError) as error:  # OSError: a full disk, say, that may be put right meanwhile
            self._retry_later(child, f"did not start ({error})")
            return
        child.started_at = time.monotonic()

    def _next_wait(self) -> float:
        due = [child.retry_at for child in self._children if child.retry_at is not None]
        return max(0.0, min([_WAIT_SECONDS, *(moment - time.monotonic() for moment in due)]))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[int]:
        """Handle signals while inside; yields a descriptor that becomes readable with each of them.

        SIGCHLD is among them, so that a death is seen at once and the loop can otherwise sleep.
        """
        wake, wake_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_end, False)
        main = threading.current_thread() is threading.main_thread()
        try:
            if main:
                handlers = {signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal}
                before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
                before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
                wake_before = signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
            yield wake
        finally:
            if main:
                signal.set_wakeup_fd(wake_before)
                for number, handler in before.items():
                    signal.signal(number, handler)
            os.close(wake)
            os.close(wake_end)
