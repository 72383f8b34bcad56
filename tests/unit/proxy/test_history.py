"""Prompts where turns are not simply appended: families that trim, bridges that refuse, and the history policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from polar.errors import SpecError
from polar.messages import Message, ModelRequest, Tool
from polar.proxy.ledger import Ledger, Prompt, anchor, as_ids, make_node
from polar.renderers import for_folder
from polar.renderers.base import Bridge, Renderer
from polar.renderers.chatml import ChatMLRenderer
from polar.spec import parse_task

MODEL = Path(__file__).parents[3] / "polar" / "tiny_engine" / "model"
TOOLS = (Tool("look", raw={"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}),)
USER, MORE = Message("user", "hi"), Message("user", "more")
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"a":1}}\n</tool_call><|im_end|>'


class Trimming(ChatMLRenderer):
    """A family whose history ends a turn with another token than the policy does."""

    def bridge(
        self,
        output_ids: list[int],
        appended: tuple[Message, ...],
        tools: tuple[Tool, ...] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Bridge:
        bridge = super().bridge(output_ids, appended, tools, prompt_ids)
        return Bridge([self.vocabulary.added["<|endoftext|>"], *bridge.ids], 1)


class Talk:
    """Calls as the proxy makes them, with outputs of the test's choice."""

    def __init__(self, renderer: Renderer, history: str = "sampled") -> None:
        self.renderer = renderer
        self.history = history
        self.ledger = Ledger()
        self.messages: tuple[Message, ...] = ()
        self.prompts: list[list[int]] = []

    def call(self, *appended: Message, written: str) -> Prompt:
        """One call with these messages more; what its prompt was made of."""
        self.messages += appended
        place = self.ledger.place(ModelRequest("m", self.messages, TOOLS), self.history)
        made = self.ledger.prompt(place, self.messages, TOOLS, self.renderer)
        self.prompts.append([*made.prefix.tolist(), *made.suffix.tolist()])
        output = self.renderer.vocabulary.template(written)  # type: ignore[attr-defined]
        name = f"cmp-{len(self.prompts):024x}"
        message = self.renderer.parse(output, TOOLS, self.prompts[-1]).message
        calls = tuple(replace(call, id=anchor(name, index)) for index, call in enumerate(message.tool_calls))
        served = replace(message, tool_calls=calls)
        node = make_node(
            name,
            made.place,
            served,
            prompt_len=len(self.prompts[-1]),
            suffix_ids=made.suffix,
            output_ids=as_ids(output),
            body_hash=b"",
            trim=made.trim,
        )
        self.ledger.add(node)
        self.messages += (served,)
        return made

    def result(self) -> Message:
        """What the tool said to the last call."""
        return Message("tool", "found", tool_call_id=self.messages[-1].tool_calls[0].id)


def test_trimmed_ids_are_known() -> None:
    """A prompt keeps its parent's output but for the last id, over several turns, and the ledger still adds up."""
    talk = Talk(Trimming(MODEL))
    first = talk.call(USER, written="one<|im_end|>")
    outputs = [talk.renderer.vocabulary.template(f"{text}<|im_end|>") for text in ("one", "two", "three")]  # type: ignore[attr-defined]
    second = talk.call(MORE, written="two<|im_end|>")
    third = talk.call(MORE, written="three<|im_end|>")
    assert (first.trim, second.trim, third.trim) == (0, 1, 1)
    assert talk.prompts[2][: len(talk.prompts[1])] == talk.prompts[1]
    assert third.prefix.tolist() == talk.prompts[1] + outputs[1][:-1]
    shown = talk.renderer.decode(talk.prompts[2])
    assert "one<|endoftext|>\n<|im_start|>user\nmore" in shown
    assert shown.count("<|endoftext|>") == 2
    # A process that reads the same nodes from their rows, with no prompt at hand, puts the same ids together.
    elsewhere = Ledger()
    for node in talk.ledger.nodes.values():
        elsewhere.add(node)
    last = list(talk.ledger.nodes.values())[-1]
    assert elsewhere.ids(last).tolist() == talk.prompts[2] + outputs[2]


def test_a_bridge_that_refuses() -> None:
    """Sampled tokens that the family cannot go on from are printed anew: a root of its own, with reason and flag."""
    talk = Talk(for_folder(MODEL, "qwen3"))
    talk.call(USER, written="<think>\nhm<|im_end|>")
    made = talk.call(MORE, written="yes<|im_end|>")
    assert (made.place.parent, made.place.reason, made.place.flags) == (None, "template_history", ("unbridged",))
    assert (made.prefix.tolist(), made.trim) == ([], 0)
    after = talk.call(MORE, written="yes<|im_end|>")
    assert after.place.parent is not None
    assert talk.prompts[2][: len(talk.prompts[1])] == talk.prompts[1]


def test_a_real_family_through_the_ledger() -> None:
    """Qwen3's layout: prompts grow by what the harness appended alone, and hold the arguments as they were sampled."""
    talk = Talk(for_folder(MODEL, "qwen3"))
    talk.call(USER, written=CALL)
    made = talk.call(talk.result(), written="done<|im_end|>")
    third = talk.call(MORE, written="bye<|im_end|>")
    assert (made.place.reason, third.place.reason) == ("anchor", "exact")
    assert talk.renderer.decode(made.suffix.tolist()) == (
        "\n<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert CALL in talk.renderer.decode(talk.prompts[2])
    for shorter, longer in zip(talk.prompts, talk.prompts[1:], strict=False):
        assert longer[: len(shorter)] == shorter


@pytest.mark.parametrize(
    ("history", "reasons", "kept"),
    [
        ("sampled", ["root", "anchor", "exact"], True),
        ("tool_cycle", ["root", "anchor", "template_history"], False),
        ("template", ["root", "template_history", "template_history"], False),
    ],
)
@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_history_policies(name: str, history: str, reasons: list[str], kept: bool) -> None:
    """Sampled tokens always, until the next user message, or never; what begins anew is the template's text."""
    talk = Talk(for_folder(MODEL, name), history)
    made = [talk.call(USER, written=CALL)]
    made.append(talk.call(talk.result(), written="done<|im_end|>"))
    made.append(talk.call(MORE, written="bye<|im_end|>"))
    assert [each.place.reason for each in made] == reasons
    assert [each.place.parent is None for each in made] == [
        reason in ("root", "template_history") for reason in reasons
    ]
    whole = talk.renderer.render(talk.messages[:-1], TOOLS)
    assert (talk.prompts[2] == whole) is not kept
    assert ('{"a":1}' in talk.renderer.decode(talk.prompts[2])) is kept


def test_the_task_chooses() -> None:
    """`history` is one of three words, and `sampled` unless told otherwise."""
    body = {"task_id": "t", "instruction": "i", "agent": {"harness": "codex"}}
    assert parse_task(body).history == "sampled"
    assert parse_task({**body, "history": "tool_cycle"}).history == "tool_cycle"
    with pytest.raises(SpecError, match="history"):
        parse_task({**body, "history": "all"})
