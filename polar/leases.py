"""Keeping leases: one thread per process renews what this process holds, and says so when one is lost.

Whether a lost lease means cancelled, timed out or taken over does not matter here: the holder must stop. So it must
when nothing was heard of the database for as long as a lease lasts, because by then somebody else may begin: a second
thread sees to that, for a cut line makes the first one wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from polar import lifecycle, policy
from polar.clock import steady
from polar.db import transaction
from polar.log import line
from polar.session_clock import SessionClock

logger = logging.getLogger(__name__)


WATCH_SECONDS = 0.5


@dataclass(eq=False, slots=True)
class Held:
    """One lease of this process."""

    lost: threading.Event = field(default_factory=threading.Event)
    renewed: float = field(default_factory=steady)
    """Not later than the moment from which the database counts the lease."""


class LeaseKeeper:
    """Renews every lease that is held through `hold`, every HEARTBEAT_SECONDS, in one transaction.

    Hears with each how long the gate was closed, and tells `clock`."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._held: dict[tuple[str, int], Held] = {}
        self._lock = threading.Lock()
        self._some = threading.Event()
        self.stopping = threading.Event()
        self.clock = SessionClock()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def hold(self, session_id: str, attempt: int) -> Iterator[threading.Event]:
        """While inside, the lease is renewed; the event is set if it was lost."""
        held = Held()
        with self._lock:
            self._held[session_id, attempt] = held
            if not self._threads:
                for name, run in (("leases", self._run), ("lease-watch", self._watch)):
                    self._threads.append(threading.Thread(target=run, name=name, daemon=True))
                    self._threads[-1].start()
        self._some.set()
        try:
            yield held.lost
        finally:
            with self._lock:
                self._held.pop((session_id, attempt), None)

    def stop(self) -> None:
        """This process is being stopped: every holder is to stop, and may give its session back."""
        self.stopping.set()
        with self._lock:
            for held in self._held.values():
                held.lost.set()

    def _all(self) -> dict[tuple[str, int], Held]:
        with self._lock:
            if not self._held:
                self._some.clear()
            return dict(self._held)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._some.wait()
            pause.wait(lifecycle.HEARTBEAT_SECONDS)
            if not (all_held := self._all()):
                continue
            began = steady()
            try:
                with transaction(self._database) as db:
                    kept = lifecycle.renew(db, all_held)
                    self.clock.heard(policy.pauses(db))
            except SQLAlchemyError as error:
                # A database that restarts comes back within the lease; if it does not, the watch ends the holders.
                logger.warning(line("leases not renewed", error=type(error).__name__))
                continue
            for (session_id, attempt), held in all_held.items():
                if session_id in kept:
                    held.renewed = began
                elif not held.lost.is_set():
                    logger.info(line("lease lost", session=session_id, attempt=attempt))
                    held.lost.set()

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            self._some.wait()
            pause.wait(WATCH_SECONDS)
            before = steady() - lifecycle.LEASE_SECONDS
            for (session_id, attempt), held in self._all().items():
                if held.renewed < before and not held.lost.is_set():
                    logger.warning(line("lease ran out unrenewed", session=session_id, attempt=attempt))
                    held.lost.set()
