"""Whatever a harness does to its history, driven through the real ledger and renderer: no token is lost or moved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from polar.builders.base import Builder, Call
from polar.builders.per_request import PerRequest
from polar.builders.prefix_merging import PrefixMerging
from polar.builders.token_tree import TokenTree
from polar.messages import Message, ModelRequest, Tool, ToolCall
from polar.proxy.ledger import Ledger, anchor, as_ids, make_node
from polar.renderers import for_folder
from polar.renderers.chatml import ChatMLRenderer
from tests.fakes.traces import check_traces, check_tree

FOLDER = Path(__file__).parents[3] / "polar" / "tiny_engine" / "model"
RENDERER = for_folder(FOLDER)
assert isinstance(RENDERER, ChatMLRenderer)
VOCABULARY = RENDERER.vocabulary
STOP = VOCABULARY.added["<|im_end|>"]
NOISE = 900
"""Ids below this are text and special tokens of all kinds."""
TOOLS = (
    (Tool("look", raw={"name": "look"}),),
    (Tool("look", raw={"name": "look"}), Tool("write", raw={"name": "write"})),
    (),
)
ANSWERS = (
    "Done. ",
    " two  spaces and a tail \n",
    "<think>\nI should look.\n</think>\n\nLet me look.",
    '<tool_call>\n{"name": "look", "arguments": {"b":1, "a": [1,2]}}\n</tool_call>',
    '<think>\nhm\n</think>\n\nboth\n<tool_call>\n{"name": "look", "arguments": {"where": "é☀"}}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {broken',
)
ECHOES = ("as it was", "reasoning dropped", "arguments", "stripped", "padded", "ids changed", "split", "rewritten")
MOVES = ("go on", "go on", "go on", "again", "edit", "compact", "new agent", "seeded agent", "other tools")
FATES = ("answered", "answered", "answered", "undelivered", "aborted", "failed", "two")


def echoed(served: Message, how: str) -> list[Message]:
    """An answer as a harness sends it back."""
    calls = served.tool_calls
    if how == "reasoning dropped":
        return [replace(served, reasoning=None)]
    if how == "arguments":
        return [replace(served, tool_calls=tuple(replace(each, arguments=respelled(each.arguments)) for each in calls))]
    if how == "stripped":
        return [replace(served, content=served.content.strip())]
    if how == "padded":
        return [replace(served, content=served.content + "\n ")]
    if how == "ids changed":
        return [replace(served, tool_calls=tuple(replace(each, id=f"toolu_{n}") for n, each in enumerate(calls)))]
    if how == "split" and len(served.content) > 1:
        half = len(served.content) // 2
        return [
            Message("assistant", served.content[:half], served.reasoning),
            replace(served, content=served.content[half:], reasoning=None),
        ]
    if how == "rewritten":
        return [replace(served, content=f"{served.content} and more")]
    return [served]


def respelled(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))
    except ValueError:
        return arguments


class Played:
    """A session that a test plays: the ledger as the proxy keeps it, and the completions as they are recorded."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.ledger = Ledger()
        self.calls: list[Call] = []
        self.talks: list[tuple[tuple[Message, ...], tuple[Tool, ...]]] = []

    def pick(self, values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def output(self) -> list[int]:
        """Sampled ids: an answer in the tokenizer's spelling or another, or noise; with its stop or without."""
        text = self.pick([*ANSWERS, None])
        if text is None:
            ids = self.draw(st.lists(st.integers(0, NOISE), min_size=1, max_size=8))
        elif self.draw(st.booleans()):
            ids = VOCABULARY.encode([text])
        else:
            ids = [token for character in text for token in VOCABULARY.plain(character)]
        return [*ids, STOP] if self.draw(st.integers(0, 4)) else ids

    def move(self) -> None:
        """The harness does something, and asks."""
        move = self.pick(MOVES) if self.talks else "compact"
        event(move)
        number = len(self.calls)
        messages, tools = self.pick(self.talks) if self.talks else ((), TOOLS[0])
        user = Message("user", f"then {self.pick((1, 2))}")
        if move == "compact":
            messages = (Message("system", "You lead."), Message("user", f"summary {self.pick((1, 2))}"))
        elif move == "new agent":
            messages = (Message("system", "You help."), Message("user", f"errand {number}"))
        elif move == "seeded agent":
            messages = (*messages, Message("user", f"errand {number}"))
        elif move == "other tools":
            tools = self.pick(TOOLS)
        elif move == "edit":
            messages = self.edited(messages)
        elif move == "go on":
            messages = (*messages, self.pick((user, Message("tool", "result", tool_call_id="x"))))
        self.ask(messages, tools)

    def edited(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        at = self.draw(st.integers(0, len(messages) - 1))
        changed = replace(messages[at], content=messages[at].content + " edited", tool_calls=())
        return (*messages[:at], changed, *messages[at + 1 : self.draw(st.integers(at + 1, len(messages)))])

    def ask(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> None:
        """One model call with all that the proxy does to it, however it ends."""
        fate = self.pick(FATES)
        event(fate)
        place = self.ledger.place(ModelRequest("m", messages, tools))
        for number in range(2 if fate == "two" else 1):
            self.sample(messages, tools, place, fate, number)

    def sample(self, messages: Any, tools: Any, place: Any, fate: str, number: int) -> None:
        made = self.ledger.prompt(place, messages, tools, RENDERER)
        place, prompt = made.place, np.concatenate([made.prefix, made.suffix])
        name = f"cmp-{len(self.calls) + 1:024x}"
        output = [] if fate == "failed" else self.output()
        parsed = RENDERER.parse(output, tools).message
        minted: tuple[ToolCall, ...] = tuple(
            replace(each, id=anchor(name, n)) for n, each in enumerate(parsed.tool_calls)
        )
        served = replace(parsed, tool_calls=minted)
        event(place.reason)
        self.calls.append(
            Call(
                id=name,
                parent_id=place.parent.id if place.parent else None,
                parent_reason=place.reason,
                prompt_ids=prompt.astype(np.int32),
                output_ids=np.array(output, np.int32),
                logprobs=-np.arange(1, len(output) + 1, dtype=np.float32) / 64 - len(self.calls),
                request={"messages": [each.chat_form() for each in messages], "tools": [each.raw for each in tools]},
                answer=served.chat_form(),
                finish_reason="stop" if output and output[-1] == STOP else "length",
                outcome={"aborted": "aborted", "failed": "failed"}.get(fate, "answered"),
                prompt_verified=True,
                delivered=fate in ("answered", "two"),
                flags=tuple(place.flags),
                metadata={"n": 2} if fate == "two" else {},
                trim=made.trim,
            )
        )
        if fate in ("aborted", "failed"):
            self.talks.append((messages, tools))
            return
        node = make_node(
            name,
            place,
            served,
            prompt_len=len(prompt),
            suffix_ids=made.suffix,
            output_ids=as_ids(output),
            body_hash=b"",
            trim=made.trim,
        )
        self.ledger.add(node)
        kept = messages if fate == "undelivered" else (*messages, *echoed(served, self.pick(ECHOES)))
        self.talks.append((kept, tools))


@st.composite
def sessions(draw: st.DrawFn) -> list[Call]:
    """What is recorded of a harness that does as it likes."""
    played = Played(draw)
    for _ in range(draw(st.integers(1, 10))):
        played.move()
    return played.calls


def check(builder: Builder, calls: list[Call]) -> None:
    built = builder.build(calls)
    check_traces(built, calls)
    for trace in built.traces:
        assert trace.fidelity == "exact"
        if "tree" in trace.metadata:
            check_tree(trace, calls)


@settings(deadline=None, max_examples=150)
@given(sessions())
def test_every_sampled_token_is_trained_once_behind_what_the_engine_saw(calls: list[Call]) -> None:
    """Whether or not the ledger found a parent, in every builder's traces."""
    for builder in (PrefixMerging(), PerRequest(), TokenTree()):
        check(builder, calls)


@settings(deadline=None, max_examples=60)
@given(sessions())
def test_nothing_is_trained_that_nobody_got(calls: list[Call]) -> None:
    """An answer that was not delivered and that nothing continues is told apart by its flag."""
    continued = {call.parent_id for call in calls}
    # Without a single link it would be canonical mode, where tokens say what was continued.
    assume(continued != {None})
    ghosts = {call.id for call in calls if not call.delivered and call.id not in continued and len(call.output_ids)}
    for builder in (PrefixMerging(), TokenTree()):
        for trace in builder.build(calls).traces:
            held = {line["completion_id"] for line in trace.metadata["completion_metadata"] if line["trained"]}
            assert bool(held & ghosts) == ("ghost" in trace.certificate["flags"])
            assert len(held) == 1 or not held & ghosts


@settings(deadline=None, max_examples=60)
@given(sessions())
def test_without_its_links_a_session_is_still_told_truly(calls: list[Call]) -> None:
    """The same completions as an engine that renders by itself records them: joined by their tokens alone."""
    unlinked = [replace(call, parent_id=None, parent_reason="no_match", trim=0) for call in calls]
    for builder in (PrefixMerging(), TokenTree()):
        check(builder, unlinked)


@settings(deadline=None, max_examples=60)
@given(sessions())
def test_a_tree_stores_no_token_twice(calls: list[Call]) -> None:
    """No two context nodes that go on from the same place begin alike, and the tree is never longer than the lines."""
    whole = TokenTree().build(calls)
    lines = PrefixMerging().build(calls)
    for trace in whole.traces:
        heads = set()
        stream = np.concatenate([trace.prompt_ids, trace.response_ids])
        for node in trace.metadata.get("tree", []):
            if not node["sampled"]:
                head = (node["parent"], int(stream[node["start"]]))
                assert head not in heads
                heads.add(head)
    tokens = [sum(len(each.prompt_ids) + len(each.response_ids) for each in built.traces) for built in (whole, lines)]
    assert tokens[0] <= tokens[1]
