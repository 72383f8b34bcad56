"""What is kept of evidence is bounded, and can be stored."""

from __future__ import annotations

import math

import orjson

from polar.evaluators.evidence import ITEMS_LIMIT, TEXT_LIMIT, TOTAL_LIMIT, bounded, clipped


def test_a_long_text_keeps_its_ends() -> None:
    """What is cut out is said, with its length."""
    text = clipped("a" * 1000 + "b" * 1000, 100)
    assert text.startswith("a" * 50) and text.endswith("b" * 50)
    assert "[1900 characters cut out here]" in text


def test_everything_together_is_bounded() -> None:
    """However many long texts there are, and whatever holds them."""
    evidence = {"lines": ["x" * TEXT_LIMIT] * 100, "more": {str(number): "y" * 5000 for number in range(500)}}
    assert len(orjson.dumps(bounded(evidence))) < TOTAL_LIMIT + 120_000
    assert bounded({"many": list(range(ITEMS_LIMIT + 5))})["many"][-1] == "[5 more]"


def test_what_the_database_refuses_is_changed() -> None:
    """Zero characters, half characters, NaN, huge numbers and things that are no JSON."""
    found = bounded(
        {"a\0": "b\0c\ud800", "nan": math.nan, "huge": 10**100, "set": {1}, "bytes": b"\xff", "object": object}
    )
    assert "\0" not in orjson.dumps(found).decode()
    assert found["nan"] == "nan" and found["set"] == [1] and found["bytes"] == "\N{REPLACEMENT CHARACTER}"
    assert orjson.loads(orjson.dumps(found)) == found


def test_deep_evidence_ends_somewhere() -> None:
    """A list in a list, ten thousand times."""
    nested: list[object] = []
    for _ in range(10_000):
        nested = [nested]
    assert b"too deeply" in orjson.dumps(bounded({"nested": nested}))


def test_small_evidence_is_kept_as_it_is() -> None:
    """Nothing changes that need not."""
    evidence = {"reward": 0.5, "tests": {"a": True, "b": None}, "output": "ok\n", "list": [1, "x"]}
    assert bounded(evidence) == evidence
