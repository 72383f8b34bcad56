"""Group commit: what all calls of this process want recorded, many in one transaction, by one task.

A caller's await returns once its record is committed; while one transaction is under way the next batch
gathers by itself. Also counts the session's turns and tokens, guarded by attempt and key: an answer that
arrives after its session moved on is refused. What a record says is `calls`' affair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from polar.errors import NodeError
from polar.log import line
from polar.proxy import metrics
from polar.proxy.database import FAILED, Database
from polar.proxy.statements import arguments, statement

logger = logging.getLogger(__name__)

BATCH = 256
EMPTY: dict[str, Any] = {"output_ids": b"", "policy_versions": [], "flags": [], "engine": {}, "parsed": {}}
"""What the end of a call says where it has nothing to say."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The attempt on whose behalf something is recorded."""

    session_id: str
    attempt: int
    key_hash: bytes


@dataclass(slots=True, eq=False)
class Record:
    """One thing to be written; `done` says whether it counts."""

    kind: str
    """`intent`, `settle`, `delivered`, `flag` or `media`."""
    values: dict[str, Any]
    fence: Fence | None = None
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Recorder:
    """The queue and the task that empties it."""

    def __init__(self, url: str, patience: float, note: float) -> None:
        """`note`: seconds that a note which nobody waits for may wait for company."""
        self._database = Database(url, 1)
        self._patience = patience
        self._note = note
        self._queue: list[Record] = []
        self._some = asyncio.Event()
        self._closing = False

    async def intend(self, rows: list[dict[str, Any]], media: Iterable[dict[str, Any]] = ()) -> None:
        """Commit that these calls are about to be made, and the pictures that they show."""
        records = [*(Record("media", row) for row in media), *(Record("intent", row) for row in rows)]
        for record in records:
            self._add(record)
        for record in records:
            await record.done

    async def settle(
        self, fence: Fence, completion_id: str, values: dict[str, Any], *, turns: int, tokens: int
    ) -> bool:
        """Commit how a call ended; False if the session moved on meanwhile, and the answer must not be given."""
        charge = {"session_id": fence.session_id, "attempt": fence.attempt, "key_hash": fence.key_hash}
        charge |= {"turns": turns, "tokens": tokens}
        row = {**EMPTY, **values, **charge, "id": completion_id}
        return await self._put(Record("settle", row, fence))

    def delivered(self, completion_id: str) -> None:
        """Note that a client received an answer whole; nobody waits for it, so it goes with whatever is next."""
        self._add(Record("delivered", {"id": completion_id}), soon=False)

    async def flag(self, completion_id: str, flag: str) -> None:
        """Commit one more flag of a completion."""
        await self._put(Record("flag", {"id": completion_id, "flags": [flag]}))

    async def run(self) -> None:
        """Write until `close`, and then what is left. If this ever fails, every call from then on does."""
        try:
            while self._queue or not self._closing:
                await self._some.wait()
                await self._write_next()
        finally:
            self._closing = True
            _lose(self._queue)
            await self._database.close()

    def close(self) -> None:
        """Take nothing more; `run` returns once all is written."""
        self._closing = True
        self._some.set()

    async def _write_next(self) -> None:
        batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
        if not self._queue and not self._closing:
            self._some.clear()
        try:
            await self._write(batch)
        finally:
            # Only a mistake of ours leaves a record undecided; whoever waits for it must not wait for ever.
            _lose(batch)

    def _add(self, record: Record, *, soon: bool = True) -> None:
        if self._closing:
            raise NodeError("the proxy is going down, or can no longer record", code="not_recording")
        self._queue.append(record)
        if soon:
            self._some.set()
        elif len(self._queue) == 1:
            asyncio.get_running_loop().call_later(self._note, self._some.set)

    async def _put(self, record: Record) -> bool:
        self._add(record)
        return await record.done

    async def _write(self, batch: list[Record]) -> None:
        began = time.monotonic()
        try:
            counts = await self._commit(batch)
        except (*FAILED, NodeError) as error:
            if len(batch) > 1 and not isinstance(error, NodeError):
                # One record that the database refuses must not take its neighbours with it.
                for record in batch:
                    await self._write([record])
                return
            logger.error(line("record lost", kind=batch[0].kind, records=len(batch), error=type(error).__name__))
            _lose(batch)
            return
        metrics.committed([record.values for record in batch], began)
        for record in batch:
            if not record.done.done():
                record.done.set_result(record.fence is None or record.fence in counts)

    async def _commit(self, batch: list[Record]) -> set[Fence]:
        """The fences of the batch that still hold. Goes through a database restart if need be."""
        kinds: dict[str, list[dict[str, Any]]] = {}
        for record in batch:
            kinds.setdefault(record.kind, []).append(record.values)
        # A statement changes a row once, and what is flagged may be delivered in the same batch.
        flags = kinds.pop("flag", [])
        rows = await self._run_statement(kinds) if kinds else []
        for row in flags:
            await self._run_statement({"flag": [row]})
        return {Fence(row.id, row.attempt, row.key_hash) for row in rows}

    async def _run_statement(self, kinds: dict[str, list[dict[str, Any]]]) -> list[Any]:
        names = tuple(sorted(kinds))
        values = [array for name in names for array in arguments(name, kinds[name])]
        return await self._database.patiently(statement(names), values, self._patience)


def _lose(records: list[Record]) -> None:
    """Tell whoever still waits that this was not recorded."""
    for record in records:
        if not record.done.done():
            record.done.set_exception(NodeError("the call could not be recorded", code="not_recorded"))
            record.done.exception()  # nobody waits for a delivery note, and its loss is in the log
