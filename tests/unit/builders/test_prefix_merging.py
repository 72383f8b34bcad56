"""Single cases of prefix merging, one for each way in which completions can hang together or fail to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polar.builders.base import Built, Call
from polar.builders.prefix_merging import PrefixMerging
from polar.errors import BuilderError, SpecError
from tests.unit.builders.conversations import child, ids, line, root, unlinked


def build(calls: list[Call], **config: Any) -> Built:
    return PrefixMerging(**config).build(calls)


def flags(built: Built, trace: int = 0) -> list[str]:
    return list(built.traces[trace].certificate["flags"])


def test_a_conversation_becomes_one_trace() -> None:
    """Sampled tokens carry the mask and their log-probabilities, what stands between carries neither."""
    calls = line(2)
    [trace] = build(calls).traces
    assert trace.prompt_ids.tolist() == [1, 2, 3]
    assert trace.response_ids.tolist() == [10, 11, 4, 5, 11, 11]
    assert trace.loss_mask.tolist() == [1, 1, 0, 0, 1, 1]
    assert trace.logprobs is not None and calls[0].logprobs is not None and calls[1].logprobs is not None
    assert [*calls[0].logprobs, 0.0, 0.0, *calls[1].logprobs] == trace.logprobs.tolist()
    assert trace.fidelity == "exact"
    assert trace.certificate["flags"] == []


def test_messages_follow_the_tokens() -> None:
    """The root's request comes first, then each served answer and what the harness appended to it."""
    [trace] = build(line(2)).traces
    assert trace.prompt_messages == [{"role": "user", "content": "begin"}]
    assert [each["content"] for each in trace.response_messages] == ["answer of t0", "before t1", "answer of t1"]


def test_messages_that_do_not_line_up_are_named() -> None:
    """A request that does not repeat the answer where it was given is flagged; the tokens are joined all the same."""
    first = root("a", ids(1), ids(2))
    second = child(first, "b", ids(3), ids(4), request={"messages": [{"role": "user", "content": "x"}], "tools": None})
    assert flags(build([first, second])) == ["messages_differ"]


def test_a_mismatch_starts_a_trace_and_says_where() -> None:
    """A child whose prompt leaves its parent's tokens stands alone, with the position of the first difference."""
    first = root("a", ids(1, 2), ids(3, 4))
    second = root("b", ids(1, 2, 3, 9, 5), ids(6), parent_id="a", parent_reason="exact")
    built = build([first, second])
    assert [trace.completion_ids for trace in built.traces] == [["a"], ["b"]]
    assert flags(built, 1) == ["parent_mismatch"]
    difference = built.traces[1].certificate["first_difference"]
    assert difference == {"kind": "parent_mismatch", "completion": "b", "parent": "a", "turn": 1, "position": 3}
    assert built.traces[1].fidelity == "exact"
    assert built.stats["chains_reconstructed_truncated"] == 1


def test_a_prompt_shorter_than_its_parent_differs_at_its_end() -> None:
    """A prompt that stops before its parent's tokens do is a mismatch there."""
    first = root("a", ids(1, 2), ids(3, 4))
    built = build([first, root("b", ids(1, 2, 3), ids(6), parent_id="a")])
    assert built.traces[1].certificate["first_difference"]["position"] == 3


def test_shared_tokens_are_trained_once() -> None:
    """With two children, the first path trains the parent; the second has it as context."""
    first = root("a", ids(1), ids(2, 3))
    left, right = child(first, "b", ids(4), ids(5)), child(first, "c", ids(6), ids(7))
    built = build([first, left, right])
    assert built.traces[0].loss_mask.tolist() == [1, 1, 0, 1]
    assert built.traces[1].loss_mask.tolist() == [0, 0, 0, 1]
    assert built.traces[1].logprobs is not None
    assert built.traces[1].logprobs[:3].tolist() == [0.0, 0.0, 0.0]
    assert flags(built, 0) == ["sibling"]
    assert flags(built, 1) == ["shared_prefix", "sibling"]
    assert built.stats["by_completion"] == {"a": "trace:0", "b": "trace:0", "c": "trace:1"}


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "unlinked"])
def test_an_identical_call_is_a_retry(linked: bool) -> None:
    """Two completions of the same prompt, as of a retry or of n > 1, are two traces that both say so."""
    calls = [root("a", ids(1, 2), ids(3)), root("b", ids(1, 2), ids(4))]
    last = child(calls[1], "c", ids(5), ids(6))
    built = build([*calls, last] if linked else unlinked([*calls, last]))
    assert [trace.completion_ids for trace in built.traces] == [["a"], ["b", "c"]]
    assert [flags(built, 0), flags(built, 1)] == [["retry"], ["retry"]]


def test_a_ghost_stands_alone() -> None:
    """An answer that was neither delivered nor continued is kept apart from the path that counted."""
    first = root("a", ids(1), ids(2))
    built = build([first, child(first, "b", ids(3), ids(4), delivered=False, outcome="aborted")])
    assert [trace.completion_ids for trace in built.traces] == [["a"], ["b"]]
    assert built.traces[1].prompt_ids.tolist() == [1, 2, 3]
    assert flags(built, 1) == ["aborted", "ghost"]
    assert flags(built, 0) == []


def test_an_undelivered_answer_that_was_continued_is_no_ghost() -> None:
    """A harness that goes on from an answer has had it, whatever the note of its delivery says."""
    first = root("a", ids(1), ids(2), delivered=False)
    built = build([first, child(first, "b", ids(3), ids(4))])
    assert [trace.completion_ids for trace in built.traces] == [["a", "b"]]
    assert flags(built) == []


def test_a_hole_is_bridged_as_context() -> None:
    """Where a completion in the middle has no output ids, its answer is context, and the trace says so."""
    first = root("a", ids(1), ids(2))
    hole = child(first, "b", ids(3), ids(), logprobs=None)
    last = root("c", ids(1, 2, 3, 8, 8, 4), ids(5), parent_id="b")
    built = build([first, hole, last])
    [trace] = built.traces
    assert trace.loss_mask.tolist() == [1, 0, 0, 0, 0, 1]
    assert "capture_hole" in flags(built)
    assert built.stats["holes"] == 1
    assert built.stats["by_completion"]["b"] == "hole"


def test_nothing_but_holes_is_an_error() -> None:
    """An engine that returns no ids ends in an error that says so, not in a session without traces."""
    with pytest.raises(BuilderError, match="token ids") as caught:
        build([root("a", ids(1), ids(), logprobs=None)])
    assert caught.value.code == "no_token_ids"


def test_auxiliary_completions_are_counted_and_left_out() -> None:
    """Side calls get traces only where the task asks for them; either way they are accounted for."""
    calls = [root("a", ids(1), ids(2)), root("title", ids(7), ids(8), role="auxiliary")]
    built = build(calls)
    assert [trace.completion_ids for trace in built.traces] == [["a"]]
    assert (built.stats["auxiliary"], built.stats["by_completion"]["title"]) == (1, "auxiliary")
    asked = build(calls, include_auxiliary=True)
    assert [trace.completion_ids for trace in asked.traces] == [["a"], ["title"]]
    assert flags(asked, 1) == ["auxiliary"]


def test_an_unknown_parent_starts_a_trace() -> None:
    """A parent that is not among the earlier completions cannot be joined to, and is named missing."""
    built = build([root("b", ids(1), ids(2), parent_id="lost")])
    assert flags(built) == ["parent_missing"]


def test_without_links_tokens_decide() -> None:
    """Canonical mode joins what is a prefix, token for token, and interleaved conversations stay apart."""
    main, other = line(3), [root("x", ids(7, 7), ids(8))]
    other.append(child(other[0], "y", ids(9), ids(8)))
    mixed = unlinked([main[0], other[0], main[1], other[1], main[2]])
    built = build(mixed)
    assert [trace.completion_ids for trace in built.traces] == [["t0", "t1", "t2"], ["x", "y"]]


def test_without_links_a_rendering_that_changed_starts_a_trace() -> None:
    """Where only the earlier prompt is a prefix, the answer was printed otherwise: no join, and the place is named."""
    built = build(unlinked([root("a", ids(1, 2), ids(3, 4)), root("b", ids(1, 2, 3, 5, 6), ids(7))]))
    assert [trace.completion_ids for trace in built.traces] == [["a"], ["b"]]
    assert built.traces[1].certificate["first_difference"]["position"] == 3


def test_policy_versions_are_in_response_coordinates() -> None:
    """Spans move with the tokens that they describe, and more than one version is named."""
    first = root("a", ids(1), ids(2, 3), policy_versions=({"version": "7", "start": 0, "end": 2},))
    spans = ({"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2})
    built = build([first, child(first, "b", ids(4), ids(5, 6), policy_versions=spans)])
    found = [(span["version"], span["start"], span["end"]) for span in built.traces[0].certificate["policy_versions"]]
    assert found == [("7", 0, 2), ("7", 3, 4), ("8", 4, 5)]
    assert flags(built) == ["mixed_policy_versions"]


def test_a_partly_known_policy_version_is_named() -> None:
    """Sampled tokens without a version beside some with one are flagged."""
    first = root("a", ids(1), ids(2), policy_versions=({"version": "7", "start": 0, "end": 1},))
    assert flags(build([first, child(first, "b", ids(4), ids(5))])) == ["unknown_policy_version"]


def test_a_changed_tool_list_is_named() -> None:
    """A trace over which the offered tools changed says so, and shows the first ones."""
    first = root("a", ids(1), ids(2))
    second = child(first, "b", ids(3), ids(4))
    second = replace(second, request={**second.request, "tools": [{"type": "function"}]})
    built = build([first, second])
    assert flags(built) == ["tools_changed"]
    assert built.traces[0].tools is None


def test_settings_of_the_original_are_taken() -> None:
    """Its two options load and change nothing; another key is refused by name."""
    built = build(line(2), end_of_turn_token_id=11, tokenizer_name_or_path="some/model")
    assert np.array_equal(build(line(2)).traces[0].response_ids, built.traces[0].response_ids)
    with pytest.raises(SpecError, match=r"builder\.config\.typo: unknown field"):
        PrefixMerging(typo=1)


def test_a_stop_that_history_spells_otherwise_is_left_out() -> None:
    """A prompt that keeps all of its parent's output but the stop continues it; the stop is counted, not trained."""
    first = root("a", ids(1), ids(2, 3))
    second = root("b", ids(1, 2, 9, 4), ids(5), parent_id="a", parent_reason="exact", trim=1)
    built = build([first, second])
    [trace] = built.traces
    assert trace.response_ids.tolist() == [2, 9, 4, 5]
    assert trace.loss_mask.tolist() == [1, 0, 0, 1]
    assert flags(built) == ["messages_differ", "stop_replaced"]
    assert (built.stats["tokens_trimmed"], trace.certificate["sampled_tokens"]) == (1, 2)


def test_the_main_agent_comes_first() -> None:
    """A sub-agent that was asked earlier from the same history comes later, and has its parent's tokens as context."""
    first = root("a", ids(1), ids(2))
    sub = child(first, "s", ids(3), ids(4), role="subagent", metadata={"spawned_by": "a"})
    built = build([first, sub, child(first, "b", ids(5), ids(6))])
    assert [trace.completion_ids for trace in built.traces] == [["a", "b"], ["a", "s"]]
    assert [trace.metadata["role"] for trace in built.traces] == ["main", "subagent"]
    assert [trace.metadata["spawned_by"] for trace in built.traces] == [None, "a"]
    assert built.traces[1].loss_mask.tolist() == [0, 0, 1]


def test_a_side_call_that_the_main_agent_went_on_from_is_trained_once() -> None:
    """Where side calls are asked for, one in the middle of the main agent's path has no second trace."""
    first = root("a", ids(1), ids(2), role="auxiliary")
    built = build([first, child(first, "b", ids(3), ids(4))], include_auxiliary=True)
    assert [trace.completion_ids for trace in built.traces] == [["a", "b"]]
