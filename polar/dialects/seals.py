"""Signatures and encrypted contents: opaque to a harness, and to us the name of a completion with its reasoning.

Not a secret: whatever a harness could forge with one must still fit the conversation that the completion was asked
with, which the ledger checks.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

import zstandard

HEAD = b"polar1"
LONGEST = 2**22
"""Bytes of reasoning that are read back; whoever sends more did not get it from here."""
ITEM = re.compile(r"^(?:msg|rs|fc|ctc|lsh|sh|apc|tsc|call|cmp|resp|chatcmpl)[_-]([0-9a-f]{24})(?:_\d+)?$")


@dataclass(frozen=True, slots=True)
class Seal:
    """What a signature says."""

    anchor: str
    """The end of the completion's id, 24 hexadecimal digits."""
    reasoning: str


def seal(completion_id: str, reasoning: str = "") -> str:
    """A signature; with `reasoning`, one from which it can be read back when the harness is shown none of it."""
    name = bytes.fromhex(completion_id.rpartition("-")[2])
    return base64.b64encode(HEAD + name + (zstandard.compress(reasoning.encode()) if reasoning else b"")).decode()


def unseal(signature: str) -> Seal | None:
    """What `seal` put in; None for anybody else's."""
    try:
        data = base64.b64decode(signature, validate=True)
        if not data.startswith(HEAD) or len(data) < len(HEAD) + 12:
            return None
        name, packed = data[len(HEAD) : len(HEAD) + 12], data[len(HEAD) + 12 :]
        reasoning = zstandard.decompress(packed, max_output_size=LONGEST).decode() if packed else ""
    except (binascii.Error, ValueError, zstandard.ZstdError):
        return None
    return Seal(name.hex(), reasoning)


def item_id(kind: str, completion_id: str) -> str:
    """An id for a part of an answer, `msg_…`, that names its completion."""
    return f"{kind}_{completion_id.rpartition('-')[2]}"


def item_anchor(value: str) -> str | None:
    """The completion that an id of ours names; None for anybody else's."""
    found = ITEM.match(value)
    return found[1] if found else None
