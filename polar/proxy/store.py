"""Earlier answers, looked up by the ids that a dialect gave them: what a stateful API is made of.

The rows of the session are the store, so nothing is kept twice and nothing outlives the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ARRAY, Text, any_, bindparam, select

from polar.bodies import joined, unpack
from polar.dialects.base import Dialect, Earlier
from polar.models import Completion
from polar.proxy.bodies import read_chains
from polar.proxy.reads import Reads
from polar.proxy.recorder import Recorder
from polar.proxy.rows import MASK
from polar.proxy.sessions import Caller

FORGOTTEN = "forgotten"
"""The flag of an answer that its harness deleted: gone for the harness, kept for the record."""
ANSWERED = select(Completion.id, Completion.answer).where(
    Completion.id == any_(bindparam("ids", type_=ARRAY(Text))),
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

    async def find(
        self, dialect: Dialect, caller: Caller, secret: str, wire_ids: Sequence[str]
    ) -> Mapping[str, Earlier]:
        """Those that are there, by the ids they were asked for with."""
        named = {wire_id: dialect.completion_id(wire_id) for wire_id in wire_ids}
        rows = await self._reads.all(
            ANSWERED,
            ids=sorted(set(named.values())),
            session_id=caller.id,
            attempt=caller.attempt,
            dialect=dialect.name,
        )
        chains = await read_chains(self._reads, [row.id for row in rows])
        found = {
            row.id: Earlier(_unmasked(joined(chains[row.id]), secret), _unmasked(unpack(row.answer), secret))
            for row in rows
        }
        return {wire_id: found[id_] for wire_id, id_ in named.items() if id_ in found}

    async def show(
        self, dialect: Dialect, caller: Caller, secret: str, kind: str, wire_id: str, params: Mapping[str, str]
    ) -> dict[str, Any]:
        """The body of a route that is about an earlier answer."""
        earlier = (await self.find(dialect, caller, secret, [wire_id])).get(wire_id)
        shown = dialect.recorded(kind, wire_id, earlier, params)
        if kind == "forget":
            await self._recorder.flag(dialect.completion_id(wire_id), FORGOTTEN)
        return shown


def _unmasked(data: bytes, secret: str) -> bytes:
    """A body as it was on the wire: a conversation that continues it must be the one the ledger saw, key and all."""
    return data.replace(MASK, secret.encode())
