"""Rows as builders read them: every prompt whole, each token once in memory, and no request read without need."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from polar.bodies import pack
from polar.builders.prefix_merging import PrefixMerging
from polar.models import Completion, now
from polar.stages.calls import to_calls

IDS = st.lists(st.integers(0, 9), max_size=4)


def row(name: str, parent: Completion | None, suffix: list[int], output: list[int], **changes: Any) -> Completion:
    """A row as the proxy's recorder leaves it."""
    trim = changes.pop("trim", 0)
    before = 0 if parent is None else parent.prompt_len + len(parent.output_ids) // 4 - trim
    messages = [{"role": "user", "content": "begin"}] * (1 if parent is None else 1 + 2 * (parent.context_len // 2 + 1))
    values = {
        "id": name,
        "parent_id": parent.id if parent else None,
        "parent_reason": "exact" if parent else "root",
        "dialect": "openai_chat",
        "role": "main",
        "outcome": "answered",
        "model_requested": "m",
        "request": pack(orjson.dumps({"model": "m", "messages": messages})),
        "parsed": {"ledger": {"fingerprint": "f", "trim": trim}},
        "context_len": len(messages),
        "prompt_len": before + len(suffix),
        "suffix_ids": np.array(suffix, "<i4").tobytes(),
        "output_ids": np.array(output, "<i4").tobytes(),
        "policy_versions": [],
        "flags": [],
        "requested_at": now(),
        "delivered": True,
    }
    return Completion(**(values | changes))


@st.composite
def forests(draw: st.DrawFn) -> list[Completion]:
    """Rows that continue each other at random, some leaving out the end of their parent's output."""
    rows: list[Completion] = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *rows]))
        most = len(parent.output_ids) // 4 if parent is not None else 0
        trim = draw(st.integers(0, min(most, 1)))
        rows.append(row(f"r{number}", parent, draw(IDS), draw(IDS), trim=trim))
    return rows


@given(forests())
def test_every_prompt_is_put_together_whole(rows: list[Completion]) -> None:
    """Parent's prompt, what it kept of the parent's output, and the row's own ids, whatever the forest."""
    whole: dict[str, list[int]] = {}
    for each, call in zip(rows, to_calls(rows), strict=True):
        kept = []
        if each.parent_id is not None:
            kept = whole[each.parent_id][: len(whole[each.parent_id]) - each.parsed["ledger"]["trim"]]
        prompt = kept + np.frombuffer(each.suffix_ids, "<i4").tolist()
        assert call.prompt_ids.tolist() == prompt
        assert call.output_ids.tolist() == np.frombuffer(each.output_ids, "<i4").tolist()
        whole[each.id] = prompt + call.output_ids.tolist()


def test_a_line_is_one_array() -> None:
    """Every turn of a conversation without branches is a view of the last one's tokens."""
    first = row("a", None, [1, 2], [3])
    second = row("b", first, [4], [5, 6])
    third = row("c", second, [7], [8])
    calls = to_calls([first, second, third])
    assert all(np.shares_memory(call.prompt_ids[:1], calls[2].prompt_ids[:1]) for call in calls)
    with pytest.raises(ValueError, match="read-only"):
        calls[2].prompt_ids[0] = 0


def test_a_request_between_the_first_and_the_last_is_never_read() -> None:
    """A trace needs its first and its last request; one in the middle that cannot be read does no harm."""
    first = row("a", None, [1], [2])
    second = row("b", first, [3], [4], request=b"this is no zstd")
    third = row("c", second, [5], [6])
    calls = to_calls([first, second, third])
    [trace] = PrefixMerging().build(calls).traces
    assert len(trace.completion_ids) == 3
    with pytest.raises(zstandard.ZstdError):
        calls[1].request["messages"]


def test_a_parent_that_is_not_there_leaves_the_prompt_unknown() -> None:
    """What is stored is only the end of the prompt then; taken for all of it, it would train on a wrong prefix."""
    first = row("a", None, [1], [2])
    second = row("b", first, [3], [4])
    third = row("c", second, [5], [6])
    calls = to_calls([second, third])
    assert [len(call.prompt_ids) for call in calls] == [0, 0]
    for trace in PrefixMerging().build(calls).traces:
        assert "missing_prompt_ids" in trace.certificate["flags"]
        assert trace.fidelity == "unverified"


def test_ids_that_do_not_add_up_leave_the_prompt_unknown() -> None:
    """A row whose parts give another length than was sent is not trusted."""
    (call,) = to_calls([row("a", None, [1, 2], [3], prompt_len=5)])
    assert len(call.prompt_ids) == 0
