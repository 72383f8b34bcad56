"""Earlier answers, looked up by the ids that a dialect gave them: what a stateful API is made of.

The rows of the session are the store, so nothing is kept twice and nothing outlives the session.
"""

from __future__ import annotations

from typing import Any

import orjson
import zstandard
from sqlalchemy import bindparam, select

from polar.dialects.base import BadRequest, Dialect
from polar.models import Completion
from polar.proxy.reads import Reads
from polar.proxy.recorder import Recorder
from polar.proxy.sessions import Caller

FORGOTTEN = "forgotten"
"""The flag of an answer that its harness deleted: gone for the harness, kept for the record."""
ANSWERED = select(Completion.request, Completion.answer).where(
    Completion.id == bindparam("id"),
    Completion.session_id == bindparam("session_id"),
    Completion.attempt == bindparam("attempt"),
    Completion.dialect == bindparam("dialect"),
    Completion.outcome == "answered",
    ~Completion.flags.contains([FORGOTTEN]),
)


class Store:
    """All sessions' answers, each seen by its own session only."""

    def __init__(self, reads: Reads, recorder: Recorder) -> None:
        self._reads = reads
        self._recorder = recorder

    async def find(self, dialect: Dialect, caller: Caller, completion_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Request and answer, as they were on the wire. Raises BadRequest (404)."""
        rows = await self._reads.all(
            ANSWERED, id=completion_id, session_id=caller.id, attempt=caller.attempt, dialect=dialect.name
        )
        if not rows:
            raise BadRequest(f"there is no answer {completion_id!r} in this session", code="not_found", status=404)
        return orjson.loads(zstandard.decompress(rows[0].request)), orjson.loads(zstandard.decompress(rows[0].answer))

    async def show(self, dialect: Dialect, caller: Caller, kind: str, wire_id: str) -> dict[str, Any]:
        """The body of a route that is about an earlier answer."""
        completion_id = dialect.completion_id(wire_id)
        asked, answered = await self.find(dialect, caller, completion_id)
        shown = dialect.recorded(kind, wire_id, asked, answered)
        if kind == "forget":
            await self._recorder.flag(completion_id, FORGOTTEN)
        return shown
