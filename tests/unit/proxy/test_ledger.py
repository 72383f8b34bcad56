"""The ledger's failure catalogue: what harnesses do to history, and where each call then belongs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.messages import Message, ModelRequest, Tool, ToolCall
from polar.proxy.ledger import Ledger, Node, anchor, as_ids, make_node
from polar.renderers import for_folder

RENDERER = for_folder(Path(__file__).parents[3] / "polar" / "tiny_engine" / "model")
TOOLS = (Tool("f", raw={"name": "f"}),)
SYSTEM, USER = Message("system", "s"), Message("user", "u")


class Conversation:
    """Calls as the proxy would make them, with answers of the test's choice."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.count = 0

    def call(self, *messages: Message, answer: Message, tools: tuple[Tool, ...] = TOOLS) -> tuple[Message, Node]:
        """One call; the served answer with its minted ids, and its node."""
        self.count += 1
        completion_id = f"cmp-{self.count:024x}"
        request = ModelRequest("m", messages, tools)
        place = self.ledger.place(request)
        prompt = self.ledger.prompt(place, messages, tools, RENDERER)
        served = replace(
            answer,
            tool_calls=tuple(replace(call, id=anchor(completion_id, i)) for i, call in enumerate(answer.tool_calls)),
        )
        opening = len(RENDERER.render((), ()))
        output = RENDERER.render((served,), ())[opening : -opening - 1]
        node = make_node(
            completion_id,
            prompt.place,
            served,
            prompt_len=len(prompt.prefix) + len(prompt.suffix),
            suffix_ids=prompt.suffix,
            output_ids=as_ids(output),
            body_hash=b"",
        )
        self.ledger.add(node)
        return served, node

    def reason(self, *messages: Message, tools: tuple[Tool, ...] = TOOLS) -> tuple[str, str | None, tuple[str, ...]]:
        """Reason, parent and flags of a call that is not made."""
        place = self.ledger.place(ModelRequest("m", messages, tools))
        return place.reason, place.parent and place.parent.id, place.flags


def calling(content: str = "", arguments: str = '{"a": 1, "b": false}') -> Message:
    """An answer with one tool call."""
    return Message("assistant", content, "because", (ToolCall("", "f", arguments),))


RESULT = Message("tool", "r")


@pytest.fixture
def talk() -> Conversation:
    """An empty conversation."""
    return Conversation()


def test_first_call_is_a_root(talk: Conversation) -> None:
    """Nothing was answered yet, so nothing is continued."""
    assert talk.reason(SYSTEM, USER) == ("root", None, ())


@pytest.mark.parametrize("arguments", ['{"b":false,"a":1}', '{"a": 1.0}', "{}", "not json"])
def test_rewritten_arguments(talk: Conversation, arguments: str) -> None:
    """The id alone names the call, whatever the harness made of its arguments; a real change is flagged."""
    served, node = talk.call(SYSTEM, USER, answer=calling())
    echo = replace(served, tool_calls=(replace(served.tool_calls[0], arguments=arguments),), reasoning=None)
    flags = (
        ()
        if json.loads('{"b":false,"a":1}') == (json.loads(arguments) if arguments[0] == "{" else 0)
        else ("rewritten",)
    )
    assert talk.reason(SYSTEM, USER, echo, RESULT) == ("anchor", node.id, flags)


def test_an_id_without_its_underscores(talk: Conversation) -> None:
    """Some harnesses send tool-call ids back with nothing but letters and digits: they still name the call."""
    served, node = talk.call(SYSTEM, USER, answer=calling())
    bare = replace(served.tool_calls[0], id=served.tool_calls[0].id.replace("_", ""), arguments="{}")
    assert talk.reason(SYSTEM, USER, replace(served, tool_calls=(bare,)), RESULT)[:2] == ("anchor", node.id)


def test_text_answer_is_found_by_hash(talk: Conversation) -> None:
    """An answer without ids is known by its text, space at the edges aside."""
    served, node = talk.call(SYSTEM, USER, answer=Message("assistant", "hello"))
    assert talk.reason(SYSTEM, USER, replace(served, content=" hello\n"), USER) == ("exact", node.id, ())


def test_rewritten_turn_does_not_hide_later_ones(talk: Conversation) -> None:
    """Once an id has settled an early turn, later text turns still match behind it."""
    first, _ = talk.call(SYSTEM, USER, answer=calling("a"))
    mangled = replace(first, content="[removed]")
    second, node = talk.call(SYSTEM, USER, mangled, RESULT, answer=Message("assistant", "done"))
    assert talk.reason(SYSTEM, USER, first, RESULT, second, USER) == ("exact", node.id, ())
    assert talk.reason(SYSTEM, USER, mangled, RESULT, second, USER) == ("exact", node.id, ("rewritten",))


def test_edited_history(talk: Conversation) -> None:
    """Of an edited history only the part before the edit is continued, and the place says so."""
    first, node = talk.call(SYSTEM, USER, answer=calling("a"))
    second, _ = talk.call(SYSTEM, USER, first, RESULT, answer=calling("b"))
    changed = replace(RESULT, content="another result")
    assert talk.reason(SYSTEM, USER, first, changed, second, RESULT) == ("edited", node.id, ())
    assert talk.reason(SYSTEM, replace(USER, content="x"), first, RESULT) == ("edited", None, ())


def test_compaction(talk: Conversation) -> None:
    """A history replaced by a summary begins anew."""
    talk.call(SYSTEM, USER, answer=calling("a"))
    assert talk.reason(SYSTEM, Message("user", "summary")) == ("root", None, ())


def test_foreign_answer(talk: Conversation) -> None:
    """An answer that we never gave is context and nobody's node."""
    talk.call(SYSTEM, USER, answer=calling("a"))
    assert talk.reason(SYSTEM, USER, Message("assistant", "few-shot"), USER) == ("no_match", None, ())


def test_changed_tools(talk: Conversation) -> None:
    """Tools stand in the prompt before everything else: with others it is another conversation."""
    served, node = talk.call(SYSTEM, USER, answer=calling("a"))
    assert talk.reason(SYSTEM, USER, served, RESULT, tools=(*TOOLS, *TOOLS)) == ("tools_changed", None, ())


def test_branches(talk: Conversation) -> None:
    """Two continuations of one answer both have it as parent, and a repeated question is a sibling."""
    served, node = talk.call(SYSTEM, USER, answer=calling("a"))
    talk.call(SYSTEM, USER, served, RESULT, answer=Message("assistant", "one"))
    assert talk.reason(SYSTEM, USER, served, Message("tool", "two")) == ("anchor", node.id, ())
    assert talk.reason(SYSTEM, USER, served, RESULT) == ("anchor", node.id, ("sibling",))


def test_equal_siblings(talk: Conversation) -> None:
    """Of two equal answers the one that was delivered is continued, else the newest."""
    served, first = talk.call(SYSTEM, USER, answer=Message("assistant", "same"))
    _, second = talk.call(SYSTEM, USER, answer=Message("assistant", "same"))
    assert talk.reason(SYSTEM, USER, served, USER)[1] == second.id
    first.delivered = True
    assert talk.reason(SYSTEM, USER, served, USER)[1] == first.id


def test_someone_elses_id(talk: Conversation) -> None:
    """An id of our shape that no call of this session has names nothing."""
    echo = replace(calling("a"), tool_calls=(ToolCall(anchor("cmp-" + "f" * 24, 0), "f", "{}"),))
    assert talk.reason(SYSTEM, USER, echo, RESULT) == ("no_match", None, ())


@given(st.lists(st.sampled_from(["text", "call", "branch", "edit"]), min_size=1, max_size=12))
def test_prompts_are_exact(turns: list[str]) -> None:
    """Whatever a harness appends, a continuing prompt begins with its parent's prompt and output."""
    talk = Conversation()
    history: tuple[Message, ...] = (SYSTEM, USER)
    for turn in turns:
        if turn == "edit":
            history = (SYSTEM, Message("user", f"edit {talk.count}"), *history[2:])
        answer = Message("assistant", f"t{talk.count}") if turn == "text" else calling(f"c{talk.count}")
        served, node = talk.call(*history, answer=answer)
        parent = talk.ledger.nodes.get(node.parent_id or "")
        whole = talk.ledger.ids(node).tolist()
        begun = talk.ledger.ids(parent).tolist() if parent else []
        assert whole[: len(begun)] == begun
        assert whole == begun + node.suffix_ids.tolist() + node.output_ids.tolist()
        if turn != "branch":
            history = (*history, served, RESULT if served.tool_calls else USER)
    if not {"edit", "branch"} & set(turns):
        assert whole == RENDERER.render((*history[:-1],), TOOLS)[: len(whole)]


@pytest.mark.parametrize(
    "parts",
    [
        [
            Message("assistant", "one two"),
            Message("assistant", "", None, (ToolCall("x", "f", '{"b": false, "a": 1}'),)),
        ],
        [Message("assistant", "one"), Message("assistant", " two", None, (ToolCall("x", "f", '{"a":1,"b":false}'),))],
        [Message("assistant", "one\n\ntwo ", "another thought", (ToolCall("y", "f", '{"a": 1, "b": false}'),))],
    ],
)
def test_an_answer_in_parts(talk: Conversation, parts: list[Message]) -> None:
    """An answer that comes back split, with other ids and white space, is the answer still."""
    answer = calling("one two")
    _, first = talk.call(SYSTEM, USER, answer=replace(answer, reasoning="a thought"))
    reason, parent, flags = talk.reason(SYSTEM, USER, *parts, Message("tool", "r", tool_call_id="x"))
    assert (reason, parent, flags) == ("exact", first.id, ())


def test_an_answer_with_a_stranger_behind_it(talk: Conversation) -> None:
    """A message that somebody else put behind an answer of ours is not swallowed with it."""
    served, first = talk.call(SYSTEM, USER, answer=calling("one"))
    place = talk.ledger.place(ModelRequest("m", (SYSTEM, USER, served, Message("assistant", "no"), USER), TOOLS))
    assert place.parent is first
    assert place.appended == 3


@pytest.mark.parametrize(
    "line",
    ["Today's date: 2026-11-{}", "Current time: 10:{} UTC", "x-anthropic-billing-header: cch={}", "Today is the {}th."],
)
def test_a_header_that_tells_the_time(talk: Conversation, line: str) -> None:
    """A system message whose clock went on continues the conversation, and is flagged."""
    system = [Message("system", f"Be brief.\n{line.format(day)}\nBe kind.") for day in (20, 21)]
    served, first = talk.call(system[0], USER, answer=Message("assistant", "a"))
    assert talk.reason(system[0], USER, served, USER) == ("exact", first.id, ())
    assert talk.reason(system[1], USER, served, USER) == ("exact", first.id, ("volatile_header",))
    other = Message("system", system[1].content.replace("kind", "rude"))
    assert talk.reason(other, USER, served, USER)[0] == "edited"


def test_the_time_in_a_tool_result_is_no_header(talk: Conversation) -> None:
    """Only system messages may change by themselves."""
    served, _ = talk.call(SYSTEM, USER, answer=calling())
    result = [Message("tool", f"Current time: {hour}", tool_call_id=served.tool_calls[0].id) for hour in (1, 2)]
    again, _ = talk.call(SYSTEM, USER, served, result[0], answer=Message("assistant", "done"))
    assert talk.reason(SYSTEM, USER, served, result[1], again, USER)[0] == "edited"


def test_another_conversation_with_the_same_opening(talk: Conversation) -> None:
    """Two conversations that begin alike part where they differ."""
    first, one = talk.call(SYSTEM, USER, answer=Message("assistant", "a"))
    second, two = talk.call(SYSTEM, USER, answer=Message("assistant", "b"))
    assert talk.reason(SYSTEM, USER, first, USER)[1] == one.id
    assert talk.reason(SYSTEM, USER, second, USER)[1] == two.id
    assert talk.reason(SYSTEM, USER, Message("assistant", "c"), USER)[:2] == ("no_match", None)
