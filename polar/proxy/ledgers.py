"""Ledgers filled from completions: rows are the truth, and each call reads only those that this process lacks.

Several processes may serve one session, so a parent may have been answered elsewhere a moment ago.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sqlalchemy import ARRAY, Text, all_, bindparam, select

from polar.models import Completion
from polar.proxy.ledger import Ledger, Node, as_ids
from polar.proxy.reads import Reads

KEPT = 1024
"""Sessions whose ledgers stay in memory; a session that comes back is read again."""


MISSING = (
    select(
        Completion.id,
        Completion.parent_id,
        Completion.parsed["ledger"].label("hashes"),
        Completion.chain_hash,
        Completion.prompt_len,
        Completion.suffix_ids,
        Completion.output_ids,
        Completion.delivered,
    )
    .where(
        Completion.session_id == bindparam("session_id"),
        Completion.attempt == bindparam("attempt"),
        Completion.outcome == "answered",
        Completion.id != all_(bindparam("known", type_=ARRAY(Text))),
    )
    .order_by(Completion.seq)
)
RECORDED = select(
    Completion.parsed,
    Completion.finish_reason,
    Completion.finished_at,
    Completion.output_ids,
    Completion.delivered,
).where(Completion.id == bindparam("id"))


class Ledgers:
    """One ledger per attempt of a session, the least recently used forgotten first."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._kept: OrderedDict[tuple[str, int], Ledger] = OrderedDict()
        self._ahead: dict[tuple[str, int], int] = {}
        """How many more turns than nodes there were, when all nodes were read."""

    async def open(self, session_id: str, attempt: int, turns: int) -> Ledger:
        """The ledger with every answer that was committed when the session had `turns` turns."""
        key = (session_id, attempt)
        ledger = self._kept.setdefault(key, Ledger())
        self._kept.move_to_end(key)
        # A turn is counted in the transaction that commits its answer. So as long as both have gone up by as much
        # since the last look, none is missing here; turns of an earlier attempt only shift the difference.
        if self._ahead.get(key) != turns - len(ledger.nodes):
            await self.refresh(ledger, session_id, attempt)
            self._ahead[key] = turns - len(ledger.nodes)
        if len(self._kept) > KEPT:
            gone, _ = self._kept.popitem(last=False)
            self._ahead.pop(gone, None)
        return ledger

    async def refresh(self, ledger: Ledger, session_id: str, attempt: int) -> None:
        """Read what is committed and not here yet."""
        for row in await self._reads.all(MISSING, session_id=session_id, attempt=attempt, known=list(ledger.nodes)):
            ledger.add(_node(row))

    def delivered(self, session_id: str, attempt: int, completion_id: str) -> None:
        """Note here, at once, that an answer reached its client; the row learns it in its own time."""
        ledger = self._kept.get((session_id, attempt))
        if ledger is not None and completion_id in ledger.nodes:
            ledger.nodes[completion_id].delivered = True

    async def recorded(self, completion_id: str) -> Any:
        """An answered completion as it was served, and whether it was delivered."""
        return (await self._reads.all(RECORDED, id=completion_id))[0]


def _node(row: Any) -> Node:
    hashes = row.hashes
    return Node(
        id=row.id,
        parent_id=row.parent_id,
        fingerprint=bytes.fromhex(hashes["fingerprint"]),
        context_hash=bytes.fromhex(hashes["context"]),
        chain_hash=row.chain_hash,
        served=bytes.fromhex(hashes["served"]),
        prompt_len=row.prompt_len,
        suffix_ids=as_ids(row.suffix_ids),
        output_ids=as_ids(row.output_ids),
        body_hash=bytes.fromhex(hashes["body"]),
        delivered=row.delivered,
        trim=hashes.get("trim", 0),
        head=bytes.fromhex(hashes.get("head", "")),
    )
