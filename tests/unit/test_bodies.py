"""Bodies stored as differences: small, and always read back whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.bodies import Bodies, joined, pack, unpack
from polar.models import Completion


def noise(size: int, seed: int = 0) -> bytes:
    """Text that compresses badly by itself."""
    words = random.Random(seed)
    return " ".join(f"{words.getrandbits(32):x}" for _ in range(size // 9)).encode()


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_difference(body: bytes, base: bytes) -> None:
    """Whatever the two have in common."""
    assert unpack(pack(body, base), base) == body
    assert unpack(pack(body)) == body


def test_changes_in_many_places() -> None:
    """A line at the top, a mark that moved, and a new turn at the end: still the difference, also of large bodies."""
    for size in (30_000, 3_000_000):
        base = b"cch=1 " + noise(size) + b" mark " + noise(2_000, 1) + b"end"
        grown = b"cch=2 " + noise(size) + b" " + noise(2_000, 1) + noise(900, 2) + b" mark end"
        blob = pack(grown, base)
        assert len(blob) < 1_500
        assert unpack(blob, base) == grown


@pytest.mark.parametrize("size", [1_000, 30_000, 800_000, 3_000_000])
def test_a_turn_costs_what_is_new_in_it(size: int) -> None:
    """A history that grew in the middle, before the tools, costs its growth, however long it is."""
    base = b'{"messages":[' + noise(size) + b'],"tools":' + noise(3_000, 1) + b"}"
    grown = base.replace(b'],"tools"', b"," + noise(900, 2) + b'],"tools"')
    blob = pack(grown, base)
    assert len(blob) < 1_500
    assert unpack(blob, base) == grown


def test_a_chain_is_read_in_order_and_forgotten() -> None:
    """Rows that build on each other are read one after the other, and only what is still needed is kept."""
    texts = [noise(2_000) + str(turn).encode() * turn for turn in range(5)]
    rows = [Completion(id="c0", request=pack(texts[0]), parsed={})]
    rows += [
        Completion(id=f"c{turn}", request=pack(texts[turn], texts[turn - 1]), parsed={"base": f"c{turn - 1}"})
        for turn in range(1, 5)
    ]
    bodies = Bodies(rows)
    for row, text in zip(rows, texts, strict=True):
        assert bodies.read(row) == text
        assert len(bodies._kept) <= 1
    assert joined([row.request for row in reversed(rows)]) == texts[-1]


def test_siblings_share_a_base() -> None:
    """A body that several are made of is kept until the last of them is read."""
    base = noise(2_000)
    rows = [Completion(id="a", request=pack(base), parsed={})]
    rows += [Completion(id=name, request=pack(base + name.encode(), base), parsed={"base": "a"}) for name in "bc"]
    bodies = Bodies(rows)
    assert [bodies.read(row) for row in rows] == [base, base + b"b", base + b"c"]
    assert bodies._kept == {}
