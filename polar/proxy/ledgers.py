"""Ledgers filled from completions: rows are the truth, and each call reads only those that this process lacks.

Several processes may serve one session, so a parent may have been answered elsewhere a moment ago.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sqlalchemy import ARRAY, Row, Text, all_, literal, select
from sqlalchemy.ext.asyncio import AsyncEngine

from polar.models import Completion
from polar.proxy.ledger import Ledger, Node, as_ids

KEPT = 1024
"""Sessions whose ledgers stay in memory; a session that comes back is read again."""


class Ledgers:
    """One ledger per attempt of a session, the least recently used forgotten first."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database
        self._kept: OrderedDict[tuple[str, int], Ledger] = OrderedDict()

    async def open(self, session_id: str, attempt: int) -> Ledger:
        """The ledger with every answer that is committed by now."""
        ledger = self._kept.setdefault((session_id, attempt), Ledger())
        self._kept.move_to_end((session_id, attempt))
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        missing = (
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
                Completion.session_id == session_id,
                Completion.attempt == attempt,
                Completion.outcome == "answered",
                Completion.id != all_(literal(list(ledger.nodes), ARRAY(Text))),
            )
            .order_by(Completion.seq)
        )
        async with self._database.connect() as db:
            rows = (await db.execute(missing)).all()
        for row in rows:
            ledger.add(_node(row))
        return ledger

    def delivered(self, session_id: str, attempt: int, completion_id: str) -> None:
        """Note here, at once, that an answer reached its client; the row learns it in its own time."""
        ledger = self._kept.get((session_id, attempt))
        if ledger is not None and completion_id in ledger.nodes:
            ledger.nodes[completion_id].delivered = True

    async def recorded(self, completion_id: str) -> Row[Any]:
        """An answered completion as it was served, and whether it was delivered."""
        columns = (
            Completion.parsed,
            Completion.finish_reason,
            Completion.finished_at,
            Completion.output_ids,
            Completion.logprobs,
            Completion.delivered,
        )
        async with self._database.connect() as db:
            return (await db.execute(select(*columns).where(Completion.id == completion_id))).one()


def _node(row: Row[Any]) -> Node:
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
    )
