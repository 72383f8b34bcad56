"""What must hold for whatever tree of completions a session leaves behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polar.builders.base import Built, Call
from polar.builders.per_request import PerRequest
from polar.builders.prefix_merging import PrefixMerging
from tests.unit.builders.conversations import child, ids, root, unlinked

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
"""Few different tokens, so that prefixes and retries meet by chance."""


@st.composite
def conversations(draw: st.DrawFn, *, faults: bool = True) -> list[Call]:
    """Completions that continue, retry, branch and, with `faults`, break in every way that is known."""
    calls: list[Call] = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *calls])) if calls else None
        output = ids(*draw(TOKENS))
        if parent is None:
            call = root(f"c{number}", ids(*draw(TOKENS)), output)
        else:
            call = child(parent, f"c{number}", ids(*draw(st.lists(st.integers(0, 2), max_size=3))), output)
        calls.append(draw(_faulty(call)) if faults else call)
    return calls


@st.composite
def _faulty(draw: st.DrawFn, call: Call) -> Call:
    fault = draw(st.sampled_from(["", "", "", "prompt", "hole", "undelivered", "auxiliary", "lost", "logprobs"]))
    if fault == "prompt":
        at = draw(st.integers(0, len(call.prompt_ids) - 1))
        prompt = call.prompt_ids.copy()
        prompt[at] = 3
        return replace(call, prompt_ids=prompt)
    if fault == "hole" and len(call.output_ids):
        return replace(call, output_ids=ids(), logprobs=None)
    changes = {
        "undelivered": {"delivered": False},
        "auxiliary": {"role": "auxiliary"},
        "lost": {"parent_id": "elsewhere"},
        "logprobs": {"logprobs": None},
    }
    return replace(call, **changes.get(fault, {}))  # type: ignore[arg-type]


def build(calls: list[Call], *, merge: bool = True) -> Built:
    """The traces, with one sound completion beside them, so that a session of holes alone is not what is met."""
    sound = root("sound", ids(9), ids(9))
    return (PrefixMerging() if merge else PerRequest()).build([*calls, sound])


def check_stream(built: Built, calls: list[Call]) -> None:
    """At each sampled token the trace shows what the engine had seen; mask and log-probabilities say who sampled."""
    by_id = {call.id: call for call in calls}
    for trace in built.traces:
        stream = np.concatenate([trace.prompt_ids, trace.response_ids])
        expected_mask = np.zeros(len(trace.response_ids), np.uint8)
        for piece in trace.metadata["completion_metadata"]:
            if piece["completion_id"] == "sound":
                expected_mask[piece["start"] : piece["end"]] = 1
                continue
            call = by_id[piece["completion_id"]]
            start, end = piece["start"] + len(trace.prompt_ids), piece["end"] + len(trace.prompt_ids)
            assert call.prompt_ids.tolist() == stream[:start].tolist()
            assert call.output_ids.tolist() == stream[start:end].tolist()
            if piece["trained"]:
                expected_mask[piece["start"] : piece["end"]] = 1
                if trace.logprobs is not None and call.logprobs is not None:
                    assert call.logprobs.tolist() == trace.logprobs[piece["start"] : piece["end"]].tolist()
        assert expected_mask.tolist() == trace.loss_mask.tolist()
        if trace.logprobs is None:
            assert "missing_logprobs" in trace.certificate["flags"]
        else:
            assert len(trace.logprobs) == len(trace.response_ids)
            assert not trace.logprobs[trace.loss_mask == 0].any()


def check_accounting(built: Built, calls: list[Call]) -> None:
    """Every completion went somewhere, and the tokens of each that has a trace carry the mask exactly once."""
    trained = [
        piece["completion_id"]
        for trace in built.traces
        for piece in trace.metadata["completion_metadata"]
        if piece["trained"]
    ]
    where = built.stats["by_completion"]
    assert sorted([*(call.id for call in calls), "sound"]) == sorted(where)
    assert sorted(each for each, place in where.items() if place.startswith("trace:")) == sorted(trained)
    for call in calls:
        if call.id not in trained:
            assert where[call.id] == ("auxiliary" if call.role != "main" else "hole")
    assert sum(int(trace.loss_mask.sum()) for trace in built.traces) == sum(
        trace.certificate["sampled_tokens"] for trace in built.traces
    )


@settings(deadline=None)
@given(conversations())
def test_every_prefix_is_what_the_engine_saw(calls: list[Call]) -> None:
    """Whatever breaks, no sampled token stands behind a prefix that the engine did not see."""
    check_stream(build(calls), calls)
    check_stream(build(unlinked(calls)), calls)
    check_stream(build(calls, merge=False), calls)


@settings(deadline=None)
@given(conversations())
def test_every_sampled_token_is_trained_once(calls: list[Call]) -> None:
    """No completion is dropped without a word, and none is trained twice."""
    check_accounting(build(calls), calls)
    check_accounting(build(unlinked(calls)), calls)
    check_accounting(build(calls, merge=False), calls)


@settings(deadline=None)
@given(conversations())
def test_a_broken_link_is_always_named(calls: list[Call]) -> None:
    """A trace that begins at a completion with a parent says why it does not continue it."""
    for trace in build(calls).traces:
        first = trace.metadata["completion_metadata"][0]
        if first["parent_id"] is None:
            continue
        named = {"parent_mismatch", "parent_missing", "ghost", "capture_hole", "auxiliary_context"}
        assert named & set(trace.certificate["flags"])


@settings(deadline=None)
@given(conversations(faults=False))
def test_a_sound_tree_has_a_trace_for_each_leaf(calls: list[Call]) -> None:
    """Where nothing broke, traces and leaves are the same in number, and every trace is exact."""
    parents = {call.parent_id for call in calls}
    # Without a single link it would be canonical mode, where tokens that meet by chance are joined.
    assume(parents != {None})
    leaves = [call.id for call in calls if call.id not in parents]
    built = build(calls)
    assert sorted([*leaves, "sound"]) == sorted(trace.completion_ids[-1] for trace in built.traces)
    assert {"exact"} == {trace.fidelity for trace in built.traces}
    assert built.stats["chains_reconstructed_truncated"] == 0
