"""`gunicorn -k workers.serving.patience.Worker …` — gunicorn's threads, with an end to how long a request may take.

gunicorn waits without limit for a request that has begun to arrive. As many clients as there are threads, each sending
a byte now and then, would hold the API for as long as they like. Answers may take any time: long polls and feeds do.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from gunicorn.http.body import Body
from gunicorn.workers.gthread import TConn, ThreadWorker


class Worker(ThreadWorker):
    """Hangs up on who has not sent a whole head, or a whole body, in time."""

    HEAD_SECONDS = 20.0
    BODY_SECONDS = 120.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.awaited: dict[TConn, float] = {}
        """Connections that a thread is reading from, and until when it may."""

    def handle(self, conn: TConn) -> Any:
        self.awaited[conn] = time.monotonic() + self.HEAD_SECONDS
        try:
            return super().handle(conn)
        finally:
            self.awaited.pop(conn, None)

    def handle_request(self, req: Any, conn: TConn) -> Any:
        self.awaited.pop(conn, None)
        req.body = TimedBody(req.body.reader, self, conn)
        return super().handle_request(req, conn)

    def murder_pending(self) -> None:
        """Called by the main loop each second."""
        super().murder_pending()
        moment = time.monotonic()
        for conn, end in list(self.awaited.items()):
            if end < moment:
                # The thread that reads there is woken with the end of the stream, and closes it.
                with suppress(OSError):
                    conn.sock.shutdown(socket.SHUT_RDWR)


class TimedBody(Body):
    """A body whose time runs while it is read, from the first read on."""

    def __init__(self, reader: Any, worker: Worker, conn: TConn) -> None:
        super().__init__(reader)
        self._worker, self._conn = worker, conn
        self._end: float | None = None

    def _read_reader(self, size: int) -> Any:
        self._end = self._end or time.monotonic() + self._worker.BODY_SECONDS
        self._worker.awaited[self._conn] = self._end
        try:
            return super()._read_reader(size)
        finally:
            self._worker.awaited.pop(self._conn, None)
