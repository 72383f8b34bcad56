"""The bodies of this process's calls on their way into the record: each as the difference to one before it.

Keeps the last body of each conversation that is under way, up to a total size, and fetches one that was recorded
elsewhere. How differences are made and undone is `polar.bodies`' affair.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import ARRAY, Integer, Text, bindparam, column, text

from polar.bodies import LONGEST_CHAIN, joined, pack
from polar.proxy.aside import aside
from polar.proxy.reads import Reads

KEPT_BYTES = 64 << 20
WORTH_FETCHING = 16_000
"""Bytes of a body from which on a base is fetched that is not at hand."""
CHAINS = (
    text(
        """
        WITH RECURSIVE chain AS (
            SELECT id AS wanted, id, request, parsed ->> 'base' AS base, 0 AS depth
            FROM completions WHERE id = ANY(:ids)
            UNION ALL
            SELECT chain.wanted, c.id, c.request, c.parsed ->> 'base', chain.depth + 1
            FROM completions c JOIN chain ON c.id = chain.base
        )
        SELECT wanted, request, depth FROM chain ORDER BY wanted, depth
        """
    )
    .bindparams(bindparam("ids", type_=ARRAY(Text)))
    .columns(column("wanted", Text), column("request"), column("depth", Integer))
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A body as its row will hold it."""

    blob: bytes
    base: str | None = None
    depth: int = 0
    """How many others it takes to read it."""


class BodyStore:
    """All sessions of this process."""

    def __init__(self, reads: Reads, aside_bytes: int) -> None:
        self._reads = reads
        self._aside_bytes = aside_bytes
        self._kept: OrderedDict[str, tuple[bytes, int]] = OrderedDict()
        self._size = 0

    async def stored(self, body: bytes, candidates: Sequence[str | None]) -> Stored:
        """`body` against the first of these completions whose body can be had. The key is masked in it already."""
        heavy = len(body) >= self._aside_bytes
        for base in candidates:
            if base is None or (found := await self._find(base, len(body))) is None:
                continue
            raw, depth = found
            if depth < LONGEST_CHAIN:
                return Stored(await aside(heavy, partial(pack, body, raw)), base, depth + 1)
        return Stored(await aside(heavy, partial(pack, body)))

    def keep(self, completion_id: str, body: bytes, stored: Stored) -> None:
        """Remember a body that is committed; the one it was made from is hardly needed any more."""
        for gone in (stored.base, completion_id):
            if gone is not None and gone in self._kept:
                self._size -= len(self._kept.pop(gone)[0])
        self._kept[completion_id] = (body, stored.depth)
        self._size += len(body)
        while self._size > KEPT_BYTES:
            _, (old, _) = self._kept.popitem(last=False)
            self._size -= len(old)

    async def _find(self, completion_id: str, size: int) -> tuple[bytes, int] | None:
        if (found := self._kept.get(completion_id)) is not None:
            self._kept.move_to_end(completion_id)
            return found
        if size < WORTH_FETCHING:
            return None
        blobs = (await read_chains(self._reads, [completion_id])).get(completion_id)
        return None if blobs is None else (joined(blobs), len(blobs) - 1)


async def read_chains(reads: Reads, ids: Sequence[str]) -> dict[str, list[bytes]]:
    """By id, the blobs of a completion's request, each a difference to the one after it."""
    found: dict[str, list[bytes]] = {}
    rows: Sequence[Any] = await reads.all(CHAINS, ids=list(ids))
    for row in rows:
        found.setdefault(row.wanted, []).append(row.request)
    return found
