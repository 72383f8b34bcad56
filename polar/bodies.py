"""Bodies of model calls as they are stored: compressed, and where it helps as the difference to an earlier one.

A harness sends its whole history with every call. Stored whole, a session would grow with the square of its turns;
against the body of the call that it continues, a body is little more than what is new in it. Which one that is stands
beside it in the row (`parsed["base"]`). Pure, but for `request_of`, which reads rows.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Iterable

import numpy as np
import zstandard
from sqlalchemy import literal, select
from sqlalchemy.orm import Session

from polar.models import Completion

LEVEL = 3
LONGEST_CHAIN = 100
"""Bodies that one may have to be put together from; the next is stored whole."""
DIFFERENCE = struct.Struct("<BII")
"""A mark that no compressed text begins with, and how many bytes at the beginning and at the end are the base's."""
MARK = 1
LARGE = 1 << 20
"""Bytes from which on a compressor needs larger tables to find what it has seen."""
WINDOW = 27
"""The largest window that is read, and with LARGE the tables, as powers of two."""
TABLES = 24
SMALL = 1 << 17
"""Bytes up to which what needs no dictionary goes through a compressor that is kept."""


class Kept(threading.local):
    """This thread's compressor: to make one takes longer than to compress a turn with it."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=SMALL.bit_length() - 1)
        self.small = zstandard.ZstdCompressor(compression_params=parameters)


KEPT = Kept()


def pack(body: bytes, base: bytes | None = None) -> bytes:
    """A body as it is stored, perhaps as the difference to `base`."""
    if base is None:
        return _compressed(body)
    head, tail = _shared(body, base)
    middle, known = body[head : len(body) - tail], base[head : len(base) - tail]
    return DIFFERENCE.pack(MARK, head, tail) + _compressed(middle, known)


def _compressed(data: bytes, known: bytes = b"") -> bytes:
    if not known and len(data) <= SMALL:
        return KEPT.small.compress(data)
    window = min(WINDOW, max(10, (len(known) + len(data)).bit_length()))
    tables = {"hash_log": min(TABLES, window), "chain_log": min(TABLES, window)} if len(known) > LARGE else {}
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=window, **tables)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=_dictionary(known)).compress(data)


def unpack(blob: bytes, base: bytes | None = None) -> bytes:
    """The inverse, given the same `base`."""
    if base is None:
        return zstandard.decompress(blob)
    _, head, tail = DIFFERENCE.unpack_from(blob)
    known = base[head : len(base) - tail]
    reader = zstandard.ZstdDecompressor(dict_data=_dictionary(known), max_window_size=2**WINDOW)
    return base[:head] + reader.decompress(blob[DIFFERENCE.size :]) + base[len(base) - tail :]


def _shared(body: bytes, base: bytes) -> tuple[int, int]:
    """How many bytes both have in common at their beginnings, and at their ends after those."""
    length = min(len(body), len(base))
    one, other = np.frombuffer(body, np.uint8), np.frombuffer(base, np.uint8)
    unequal = one[:length] != other[:length]
    head = int(unequal.argmax()) if unequal.any() else length
    length -= head
    if not length:
        return head, 0
    unequal = one[len(one) - length :][::-1] != other[len(other) - length :][::-1]
    return head, int(unequal.argmax()) if unequal.any() else length


def _dictionary(known: bytes) -> zstandard.ZstdCompressionDict | None:
    return zstandard.ZstdCompressionDict(known, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if known else None


def base_of(row: Completion) -> str | None:
    """The completion to whose body a row's is the difference."""
    base: str | None = row.parsed.get("base")
    return base


class Bodies:
    """The bodies of a session's completions, read in order; each is forgotten once no later one is made of it."""

    def __init__(self, rows: Iterable[Completion]) -> None:
        """`rows`: those that will be read, all of a session's or a page of them."""
        self._needed = Counter(base for row in rows if (base := base_of(row)) is not None)
        self._kept: dict[str, bytes] = {}

    def read(self, row: Completion, db: Session | None = None) -> bytes:
        """The request of a row. With `db`, bodies that were not read before are fetched."""
        base = base_of(row)
        if base is not None and base not in self._kept and db is not None:
            self._kept[base] = request_of(db, base)
        body = unpack(row.request, None if base is None else self._kept[base])
        if base is not None:
            self._needed[base] -= 1
            if self._needed[base] <= 0:
                del self._kept[base]
        if self._needed[row.id]:
            self._kept[row.id] = body
        return body


def request_of(db: Session, completion_id: str) -> bytes:
    """The request of one completion, put together from as many rows as it takes, read in one query."""
    base = Completion.parsed["base"].as_string()
    first = select(Completion.request, base.label("base"), literal(0).label("depth"))
    chain = first.where(Completion.id == completion_id).cte("chain", recursive=True)
    following = select(Completion.request, base, chain.c.depth + 1).where(Completion.id == chain.c.base)
    chain = chain.union_all(following)
    return joined(list(db.scalars(select(chain.c.request).order_by(chain.c.depth))))


def joined(blobs: list[bytes]) -> bytes:
    """The first of these bodies, each of which is a difference to the one after it."""
    body = None
    for blob in reversed(blobs):
        body = unpack(blob, body)
    assert body is not None
    return body
