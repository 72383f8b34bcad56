"""Single cases of the token tree; that it holds for any session is tested in test_any_harness."""

from __future__ import annotations

from polar.builders.base import Call, Trace
from polar.builders.prefix_merging import PrefixMerging
from polar.builders.token_tree import TokenTree
from tests.fakes.traces import check_traces, check_tree
from tests.unit.builders.conversations import child, ids, line, root


def tree(*calls: Call) -> Trace:
    """The tree of these calls, checked."""
    built = TokenTree().build(list(calls))
    check_traces(built, list(calls))
    check_tree(built.traces[0], list(calls))
    return built.traces[0]


def table(trace: Trace) -> list[tuple[int, int, int, str | None]]:
    return [(node["parent"], node["start"], node["end"], node["completion_id"]) for node in trace.metadata["tree"]]


def test_without_a_branch_it_is_the_same_line() -> None:
    """A plain conversation has the same tokens, mask and log-probabilities as prefix_merging gives it."""
    trace, [merged] = tree(*line(3)), PrefixMerging().build(line(3)).traces
    assert trace.prompt_ids.tolist() == merged.prompt_ids.tolist()
    assert trace.response_ids.tolist() == merged.response_ids.tolist()
    assert trace.loss_mask.tolist() == merged.loss_mask.tolist()
    assert trace.certificate["flags"] == []
    assert [message["content"] for message in trace.response_messages] == [
        message["content"] for message in merged.response_messages
    ]


def test_what_two_conversations_begin_with_stands_once() -> None:
    """Two roots share their system prompt; a retry shares its prompt and is a node of its own."""
    trace = tree(
        root("a", ids(1, 2, 3), ids(9)),
        root("b", ids(1, 2, 4), ids(9), role="subagent"),
        root("c", ids(1, 2, 3), ids(8)),
    )
    assert table(trace) == [
        (-1, 0, 2, None),
        (0, 2, 3, None),
        (1, 3, 4, "a"),
        (1, 4, 5, "c"),
        (0, 5, 6, None),
        (4, 6, 7, "b"),
    ]
    assert trace.prompt_ids.tolist() == [1, 2, 3]
    assert trace.certificate["flags"] == ["branched", "retry", "subagent"]
    assert [node["position"] for node in trace.metadata["tree"]] == [0, 2, 3, 3, 2, 3]


def test_sampled_tokens_are_never_shared() -> None:
    """Two samples that happen to be alike are two nodes, each with its own log-probabilities."""
    trace = tree(root("a", ids(1), ids(7, 7)), root("b", ids(1), ids(7, 7)))
    assert table(trace) == [(-1, 0, 1, None), (0, 1, 3, "a"), (0, 3, 5, "b")]
    assert trace.logprobs is not None and len(set(trace.logprobs.tolist())) == 4


def test_a_stop_that_one_branch_does_not_keep_is_still_trained() -> None:
    """The end of an output is parted from the rest where a continuation leaves it, and both carry the mask."""
    first = root("a", ids(1), ids(2, 3))
    second = root("b", ids(1, 2, 9), ids(5), parent_id="a", parent_reason="exact", trim=1)
    trace = tree(first, second, child(first, "c", ids(4), ids(6)))
    assert table(trace) == [
        (-1, 0, 1, None),
        (0, 1, 2, "a"),
        (1, 2, 3, "a"),
        (2, 3, 4, None),
        (3, 4, 5, "c"),
        (1, 5, 6, None),
        (5, 6, 7, "b"),
    ]
    assert trace.certificate["sampled_tokens"] == 4


def test_a_ghost_stands_beside_the_tree() -> None:
    """What nobody got is no part of the tree, whose flag would keep the whole of it from training."""
    first = root("a", ids(1), ids(2))
    built = TokenTree().build([first, child(first, "b", ids(3), ids(4), delivered=False)])
    assert [trace.completion_ids for trace in built.traces] == [["a"], ["b"]]
    assert ["ghost" in trace.certificate["flags"] for trace in built.traces] == [False, True]
