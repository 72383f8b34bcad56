"""Keeping leases: one thread per process renews what this process holds, and says so when one is lost.

Whether a lost lease means cancelled, timed out or taken over does not matter here: the holder must stop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from polar import lifecycle
from polar.db import transaction
from polar.log import line

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews every lease that is held through `hold`, every HEARTBEAT_SECONDS, in one transaction."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._held: dict[tuple[str, int], threading.Event] = {}
        self._lock = threading.Lock()
        self._some = threading.Event()
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def hold(self, session_id: str, attempt: int) -> Iterator[threading.Event]:
        """While inside, the lease is renewed; the event is set if it was lost."""
        lost = threading.Event()
        with self._lock:
            self._held[session_id, attempt] = lost
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()
        self._some.set()
        try:
            yield lost
        finally:
            with self._lock:
                self._held.pop((session_id, attempt), None)

    def stop(self) -> None:
        """This process is being stopped: every holder is to stop, and may give its session back."""
        self.stopping.set()
        with self._lock:
            for lost in self._held.values():
                lost.set()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._some.wait()
            pause.wait(lifecycle.HEARTBEAT_SECONDS)
            with self._lock:
                held = dict(self._held)
                if not held:
                    self._some.clear()
                    continue
            try:
                with transaction(self._database) as db:
                    kept = lifecycle.renew(db, held)
            except SQLAlchemyError as error:
                # A database that restarts comes back within the lease; if it does not, the sweeper decides.
                logger.warning(line("leases not renewed", error=type(error).__name__))
                continue
            for (session_id, attempt), lost in held.items():
                if session_id not in kept and not lost.is_set():
                    logger.info(line("lease lost", session=session_id, attempt=attempt))
                    lost.set()
