"""The builder for engines that give no ids."""

from __future__ import annotations

from dataclasses import replace

from polar import builders
from polar.builders.base import Call
from polar.spec import StrategySpec
from tests.unit.builders.conversations import child, ids, line, root

BUILDER = builders.create(StrategySpec(strategy="messages"))


def bare(calls: list[Call]) -> list[Call]:
    """The same completions as an engine without ids leaves them."""
    nothing = ids()
    return [replace(c, prompt_ids=nothing, output_ids=nothing, logprobs=None, parent_id=None) for c in calls]


def test_a_conversation_is_one_trace_without_tokens() -> None:
    """What was said stands in order, nothing carries the mask, and the certificate claims nothing."""
    calls = bare(line(3))
    (trace,) = BUILDER.build(calls).traces
    assert trace.completion_ids == ["t0", "t1", "t2"]
    said = [message["content"] for message in trace.prompt_messages + trace.response_messages]
    assert said == ["begin", "answer of t0", "before t1", "answer of t1", "before t2", "answer of t2"]
    assert len(trace.loss_mask) == len(trace.prompt_ids) == len(trace.response_ids) == 0
    assert (trace.fidelity, trace.certificate["sampled_tokens"]) == ("unverified", 0)


def test_ids_are_left_out_where_there_are_some() -> None:
    """A trace of this builder cannot be trained on by mistake."""
    (trace,) = BUILDER.build(line(2)).traces
    assert not trace.loss_mask.any()
    assert trace.logprobs is None or len(trace.logprobs) == 0


def test_every_call_is_accounted_for() -> None:
    """A branch is a trace of its own; side calls and failures are named."""
    first = root("a", ids(1), ids(2))
    left, right = child(first, "l", ids(3), ids(4)), child(first, "r", ids(5), ids(6))
    title = replace(root("t", ids(7), ids(8)), role="auxiliary", request={"messages": [{"role": "user"}]})
    broken = replace(root("x", ids(9), ids()), outcome="failed", request={"messages": []})
    built = BUILDER.build(bare([first, left, right, title, broken]))
    assert [trace.completion_ids for trace in built.traces] == [["a", "l"], ["a", "r"]]
    where = {"a": "trace:0", "l": "trace:0", "r": "trace:1", "t": "auxiliary", "x": "failed"}
    assert built.stats["by_completion"] == where
