"""Group commit: what all calls of this process want recorded, many in one transaction, by one task.

A caller's await returns once its record is committed; while one transaction is under way the next batch
gathers by itself. Also counts the session's turns and tokens, guarded by attempt and key: an answer that
arrives after its session moved on is refused. What a record says is `calls`' affair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from polar.errors import NodeError
from polar.lifecycle import Stage, State
from polar.log import line
from polar.models import now
from polar.proxy import metrics
from polar.proxy.database import AWAY, Connection, Database

logger = logging.getLogger(__name__)

BATCH = 256
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)
INTENDED = (
    "id",
    "session_id",
    "attempt",
    "outcome",
    "parent_id",
    "parent_reason",
    "dialect",
    "role",
    "model_requested",
    "request",
    "parsed",
    "context_len",
    "prompt_len",
    "suffix_ids",
    "flags",
    "requested_at",
)
"""Columns that the beginning of a call writes."""
SETTLED = (
    "outcome",
    "model_used",
    "answer",
    "parsed",
    "chain_hash",
    "output_ids",
    "logprobs",
    "finish_reason",
    "policy_versions",
    "prompt_verified",
    "flags",
    "engine",
    "error",
    "finished_at",
)
"""Columns that the end of a call writes; each is in every record, because they travel as one statement."""

LEARNED = ("prompt_len", "suffix_ids")
"""Written by the beginning, and by the end where only the engine knew them."""

# A commit whose acknowledgement was lost is repeated: the row may be there.
INTEND = f"""
    INSERT INTO completions ({", ".join(INTENDED)}, output_ids, policy_versions, engine, delivered)
    VALUES ({", ".join(f"%({name})s" for name in INTENDED)}, '', '[]', '{{}}', false) ON CONFLICT DO NOTHING
"""
# What the beginning noted of a call stays, but for what its end knows better: an engine that renders by itself says
# only with its answer what the prompt was.
SETTLE = f"""
    UPDATE completions SET {", ".join(f"{name} = %({name})s" for name in SETTLED if name != "parsed")},
        parsed = parsed || %(parsed)s,
        prompt_len = coalesce(%(prompt_len)s, prompt_len), suffix_ids = coalesce(%(suffix_ids)s, suffix_ids)
    WHERE id = %(key)s AND outcome = 'asked'
"""
DELIVER = "UPDATE completions SET delivered = true WHERE id = %(key)s"
MEDIA = """
    INSERT INTO media (digest, media_type, data, created_at)
    VALUES (%(digest)s, %(media_type)s, %(data)s, %(created_at)s) ON CONFLICT DO NOTHING
"""
FLAG = "UPDATE completions SET flags = flags || %(new)s WHERE id = %(key)s"
# Rows are locked in the order of their ids first: two proxies whose batches name the same sessions must not
# wait for each other.
CHARGE = """
    WITH due AS (
        SELECT * FROM unnest(%(ids)s::text[], %(attempts)s::int[], %(keys)s::bytea[],
                             %(turns)s::int[], %(tokens)s::int[]) AS d(id, attempt, key_hash, turns, tokens)
    ), held AS (
        SELECT s.id FROM sessions s JOIN due ON due.id = s.id AND due.attempt = s.attempt AND due.key_hash = s.key_hash
        WHERE s.stage = %(stage)s AND s.state = %(state)s ORDER BY s.id FOR NO KEY UPDATE OF s
    )
    UPDATE sessions s SET turns = s.turns + due.turns, sampled_tokens = s.sampled_tokens + due.tokens
    FROM due, held WHERE s.id = held.id AND due.id = s.id
    RETURNING s.id, s.attempt, s.key_hash
"""


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
    turns: int = 0
    tokens: int = 0
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Recorder:
    """The queue and the task that empties it."""

    def __init__(self, url: str, patience: float) -> None:
        self._database = Database(url, 1)
        self._patience = patience
        self._queue: list[Record] = []
        self._some = asyncio.Event()
        self._closing = False

    async def intend(self, rows: list[dict[str, Any]], media: Iterable[dict[str, Any]] = ()) -> None:
        """Commit that these calls are about to be made, and the pictures that they show."""
        records = [*(Record("media", row) for row in media), *(Record("intent", row) for row in rows)]
        await asyncio.gather(*(self._put(record) for record in records))

    async def settle(
        self, fence: Fence, completion_id: str, values: dict[str, Any], *, turns: int, tokens: int
    ) -> bool:
        """Commit how a call ended; False if the session moved on meanwhile, and the answer must not be given."""
        return await self._put(Record("settle", {"key": completion_id, **values}, fence, turns, tokens))

    def delivered(self, completion_id: str) -> None:
        """Note that a client received an answer whole; nobody waits for it."""
        self._add(Record("delivered", {"key": completion_id}))

    async def flag(self, completion_id: str, flag: str) -> None:
        """Commit one more flag of a completion."""
        await self._put(Record("flag", {"key": completion_id, "new": [flag]}))

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

    def _add(self, record: Record) -> None:
        if self._closing:
            raise NodeError("the proxy is going down, or can no longer record", code="not_recording")
        self._queue.append(record)
        self._some.set()

    async def _put(self, record: Record) -> bool:
        self._add(record)
        return await record.done

    async def _write(self, batch: list[Record]) -> None:
        began = time.monotonic()
        try:
            counts = await self._patiently(batch)
        except (psycopg.Error, NodeError) as error:
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

    async def _patiently(self, batch: list[Record]) -> set[Fence]:
        """Commit, through a database restart if need be."""
        until = asyncio.get_running_loop().time() + self._patience
        for attempt in range(10_000):
            try:
                async with self._database.connection() as db:
                    if len(batch) == 1 and batch[0].kind != "settle":
                        return await _commit(db, batch)  # one statement is a transaction by itself
                    async with db.transaction():
                        return await _commit(db, batch)
            except AWAY as error:
                pause = PAUSES[min(attempt, len(PAUSES) - 1)]
                if asyncio.get_running_loop().time() + pause > until:
                    raise NodeError("the database does not answer", code="database_down") from error
                await asyncio.sleep(pause)
        raise NodeError("the database does not answer", code="database_down")


def _lose(records: list[Record]) -> None:
    """Tell whoever still waits that this was not recorded."""
    for record in records:
        if not record.done.done():
            record.done.set_exception(NodeError("the call could not be recorded", code="not_recorded"))
            record.done.exception()  # nobody waits for a delivery note, and its loss is in the log


async def _commit(db: Connection, batch: list[Record]) -> set[Fence]:
    kinds: dict[str, list[Record]] = {"media": [], "intent": [], "settle": [], "delivered": [], "flag": []}
    for record in batch:
        kinds[record.kind].append(record)
    counts = await _charge(db, kinds["settle"]) if kinds["settle"] else set()
    settled = [_settled(record, counts) for record in kinds["settle"]]
    async with db.cursor() as cursor:
        for statement, rows in (
            (MEDIA, sorted((record.values for record in kinds["media"]), key=lambda row: str(row["digest"]))),
            (INTEND, [record.values for record in kinds["intent"]]),
            (SETTLE, settled),
            (DELIVER, [record.values for record in kinds["delivered"]]),
            (FLAG, [record.values for record in kinds["flag"]]),
        ):
            if len(rows) == 1:
                await cursor.execute(statement, _adapted(rows[0]))
            elif rows:
                await cursor.executemany(statement, [_adapted(row) for row in rows])
    return counts


def _adapted(row: dict[str, Any]) -> dict[str, Any]:
    return {name: Jsonb(value) if isinstance(value, (dict, list)) else value for name, value in row.items()}


async def _charge(db: Connection, records: list[Record]) -> set[Fence]:
    """Count turns and tokens; the fences that still hold."""
    turns: Counter[Fence] = Counter()
    tokens: Counter[Fence] = Counter()
    for record in records:
        assert record.fence is not None
        turns[record.fence] += record.turns
        tokens[record.fence] += record.tokens
    fences = list(turns)
    cursor = await db.execute(
        CHARGE,
        {
            "ids": [fence.session_id for fence in fences],
            "attempts": [fence.attempt for fence in fences],
            "keys": [fence.key_hash for fence in fences],
            "turns": [turns[fence] for fence in fences],
            "tokens": [tokens[fence] for fence in fences],
            "stage": Stage.EXECUTE.value,
            "state": State.RUNNING.value,
        },
    )
    return {Fence(row.id, row.attempt, row.key_hash) for row in await cursor.fetchall()}


def _settled(record: Record, counts: set[Fence]) -> dict[str, Any]:
    values = record.values
    if values["outcome"] == "answered" and record.fence not in counts:
        # The tokens were sampled and are kept, but no harness sees them and no builder may count them.
        error = {"code": "session_ended", "message": "the session moved on before the answer was there"}
        values = {**values, "outcome": "failed", "error": error}
    return {"key": values["key"], **{name: values.get(name, _empty(name)) for name in (*SETTLED, *LEARNED)}}


def _empty(name: str) -> Any:
    defaults: dict[str, Any] = {
        "output_ids": b"",
        "policy_versions": [],
        "flags": [],
        "engine": {},
        "finished_at": now(),
    }
    return defaults.get(name)
