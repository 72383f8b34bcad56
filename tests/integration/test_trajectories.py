"""What harnesses do to a session, driven through the real proxy, and the traces that come of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar.builders.base import Built, Call, Trace
from polar.builders.prefix_merging import PrefixMerging
from polar.builders.token_tree import TokenTree
from polar.stages.calls import load_calls
from polar.stages.roles import assign
from tests.fakes.traces import check_traces, check_tree
from tests.integration.rig import client, completions, free_port, open_session, process, until

pytestmark = pytest.mark.integration
Messages = list[dict[str, Any]]
PARSER, LEXER = "Explore the parser and report its bugs.", "Explore the lexer and report its bugs."
ERRANDS = [{"name": "agent", "arguments": {"prompt": text}} for text in (PARSER, LEXER)]
SCRIPT = {
    "scripts": [
        {"match": "delegate", "answers": [{"tool_calls": ERRANDS}, {"content": "All is well."}, {"content": "Bye."}]},
        {"answers": [{"content": f"Answer {number}."} for number in range(6)]},
    ]
}
AGENT = {"type": "function", "function": {"name": "agent", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def errand_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scripted engine whose main agent sends two others."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info"):
        yield f"http://127.0.0.1:{port}"


class Harness:
    """An agent that this test plays, on one session."""

    def __init__(self, database: Engine, url: str, session_id: str) -> None:
        self.database, self.session_id = database, session_id
        self._client = client(url)
        self._asked = 0

    def ask(self, messages: Messages, **options: Any) -> Any:
        """The answer's choices, once it is noted that they were delivered."""
        options = {"tools": [AGENT], **options}
        answer = self._client.chat.completions.create(model="m", messages=messages, **options)  # type: ignore[call-overload]
        self._asked += options.get("n", 1)
        until(lambda: all(row.delivered for row in completions(self.database)))
        return [choice.message.model_dump(exclude_none=True) for choice in answer.choices]

    def turn(self, messages: Messages, then: str) -> Messages:
        """The conversation with the answer and what comes after it."""
        return [*messages, self.ask(messages)[0], {"role": "user", "content": then}]

    def calls(self) -> list[Call]:
        """What is recorded, with everyone's part."""
        with Session(self.database) as db:
            return assign(load_calls(db, self.session_id, 1), None)

    def built(self) -> Built:
        """The trajectory, of which every token has been compared with what the engine was given and gave."""
        calls = self.calls()
        assert len(calls) == self._asked
        built = PrefixMerging().build(calls)
        check_traces(built, calls)
        assert {"exact"} == {trace.fidelity for trace in built.traces}
        (tree,) = TokenTree().build(calls).traces
        check_tree(tree, calls)
        return built


@pytest.fixture
def harness(database: Engine, proxy: str, errand_engine: str) -> Harness:
    """An agent on a fresh session."""
    return Harness(database, proxy, open_session(database, errand_engine))


def facts(built: Built) -> list[tuple[int, str, list[str]]]:
    """Each trace's completions, role and flags."""
    return [(len(each.completion_ids), each.metadata["role"], each.certificate["flags"]) for each in built.traces]


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def sampled(trace: Trace) -> int:
    return sum(piece["trained"] for piece in trace.metadata["completion_metadata"])


def test_a_conversation_is_one_trace(harness: Harness) -> None:
    """Three turns, one exact trace, no flags."""
    messages = harness.turn(harness.turn(user("begin"), "go on"), "and on")
    harness.ask(messages)
    built = harness.built()
    assert facts(built) == [(3, "main", [])]
    texts = [message["content"] for message in built.traces[0].response_messages]
    assert texts == ["Answer 0.", "go on", "Answer 1.", "and on", "Answer 2."]


def test_a_retry_is_a_trace_of_its_own(harness: Harness) -> None:
    """The same call again after its answer came is a second sample, and the one that was kept goes on."""
    harness.ask(user("begin"))
    harness.ask(harness.turn(user("begin"), "go on"))
    built = harness.built()
    assert sorted(facts(built)) == [(1, "main", ["retry"]), (2, "main", ["retry", "sibling"])]


def test_several_answers_are_named(harness: Harness) -> None:
    """Each of n samples is its own trace and says so; what goes on from one of them continues that one."""
    first, _ = harness.ask(user("begin"), n=2)
    harness.ask([*user("begin"), first, *user("go on")])
    built = harness.built()
    assert [flags for _, _, flags in facts(built) if "several_answers" not in flags] == []
    assert sorted(count for count, _, _ in facts(built)) == [1, 2]


def delegated(harness: Harness) -> tuple[Messages, Messages]:
    """The main agent's history before and after it sent others."""
    before = [{"role": "system", "content": "You lead."}, *user("delegate")]
    return before, [*before, harness.ask(before)[0]]


def results(history: Messages) -> Messages:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in history[-1]["tool_calls"]]


def test_parallel_subagents_stay_apart(harness: Harness) -> None:
    """Two sub-agents that take turns are a trace each, after the main agent's, and say who sent them."""
    before, history = delegated(harness)
    helper = {"role": "system", "content": "You help."}
    one = harness.turn([helper, *user(PARSER)], "go on")
    other = harness.turn([helper, *user(LEXER)], "go on")
    harness.ask(one)
    harness.ask(other)
    harness.ask([*history, *results(history)])
    built = harness.built()
    main = harness.calls()[0].id
    assert facts(built) == [(2, "main", []), (2, "subagent", ["subagent"]), (2, "subagent", ["subagent"])]
    assert [trace.metadata["spawned_by"] for trace in built.traces] == [None, main, main]


def test_a_seeded_subagent_does_not_hijack_its_parent(harness: Harness) -> None:
    """A sub-agent that is given the parent's whole history is a branch: the main trace is whole and comes first."""
    before, history = delegated(harness)
    seeded = harness.turn([*history, *user(PARSER)], "go on")
    harness.ask(seeded)
    harness.ask([*history, *results(history)])
    built = harness.built()
    assert [(len(trace.completion_ids), trace.metadata["role"], sampled(trace)) for trace in built.traces] == [
        (2, "main", 2),
        (3, "subagent", 2),
    ]
    assert built.traces[1].certificate["flags"] == ["shared_prefix", "sibling", "subagent"]
    assert built.traces[1].metadata["spawned_by"] == harness.calls()[0].id


def test_a_seeded_subagent_leaves_the_main_agent_its_tokens(harness: Harness) -> None:
    """Where the main agent never went on, what it said is still trained in a trace of its own."""
    before, history = delegated(harness)
    harness.ask([*history, *user(PARSER)])
    harness.ask([*history, *user(LEXER)])
    assert [(role, flags) for _, role, flags in facts(harness.built())] == [
        ("main", []),
        ("subagent", ["shared_prefix", "sibling", "subagent"]),
        ("subagent", ["shared_prefix", "sibling", "subagent"]),
    ]


def test_compaction_begins_a_trace(harness: Harness) -> None:
    """A history that was replaced by its summary is a new root; both halves are exact and whole."""
    harness.ask(harness.turn(user("begin"), "go on"))
    compacted = harness.turn(user("Summary: it began."), "go on after that")
    harness.ask(compacted)
    built = harness.built()
    assert [count for count, _, _ in facts(built)] == [2, 2]
    assert all("shared_prefix" not in flags for _, _, flags in facts(built))


def test_edited_history_branches_where_it_was_edited(harness: Harness) -> None:
    """A later message that changed goes back to the deepest call that still holds, and trains nothing twice."""
    messages = harness.turn(harness.turn(user("begin"), "go on"), "and on")
    harness.ask(messages)
    edited = [*messages[:2], {"role": "user", "content": "something else"}, *messages[3:]]
    harness.ask(edited)
    built = harness.built()
    assert [sampled(trace) for trace in built.traces] == [3, 1]
    assert "rewritten_history" in built.traces[1].certificate["flags"]
    assert "shared_prefix" in built.traces[1].certificate["flags"]


def test_changed_tools_begin_a_trace(harness: Harness) -> None:
    """Another tool list is another prompt head: the conversation begins anew and says why."""
    messages = harness.turn(user("begin"), "go on")
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    harness.ask(messages, tools=[other])
    built = harness.built()
    assert facts(built) == [(1, "main", []), (1, "main", ["tools_changed"])]


def test_an_answer_cut_short_and_asked_again(harness: Harness) -> None:
    """A truncated answer that the harness threw away is its own trace, flagged, and not part of the one that counts."""
    harness.ask(user("begin"), max_tokens=2)
    harness.ask(harness.turn(user("begin"), "go on"))
    built = harness.built()
    assert ["retry", "truncated"] in [flags for _, _, flags in facts(built)]
    assert sorted(count for count, _, _ in facts(built)) == [1, 2]
