"""Which parts of a family's outputs may be shown before the output is whole, found by trying.

Families read in different ways: some know reasoning by its first closing tag, some join several blocks, some only
see at the end that a text was a tool call. Rather than a table of these, every short sequence of the family's own
control tokens is read both early and whole; a part that would once have had to be taken back is shown late.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from polar.errors import HarnessError
from polar.messages import Message, Tool, ToolCall
from polar.renderers.packaged_pieces import THINKING

if TYPE_CHECKING:
    from polar.renderers.packaged import LibraryRenderer

CHOICES = (frozenset({"reasoning", "text"}), frozenset({"reasoning"}), frozenset({"text"}))
TOOL = Tool("look", raw={"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}})
TURNS = (
    Message("assistant", "all done", "let me see"),
    Message("assistant", "I look", "let me see", (ToolCall("c", "look", '{"key": "a"}'),)),
    Message("assistant", "", None, (ToolCall("c", "look", '{"key": "a"}'), ToolCall("d", "look", "{}"))),
)
MOST_MARKS = 14


@lru_cache(maxsize=64)
def early_parts(renderer: LibraryRenderer, calls: bool) -> frozenset[str]:
    """The parts that are safe to show early, with tools offered or without."""
    outputs = list(_outputs(renderer))
    for choice in CHOICES:
        if all(_holds(renderer, output, choice, (TOOL,) if calls else ()) for output in outputs):
            return choice
    return frozenset()


def shows_the_beginning(shown: dict[str, str], message: Message) -> bool:
    """Whether what was shown is how the whole answer begins: all of its reasoning before any of its text."""
    reasoning = message.reasoning or ""
    return (
        message.content.startswith(shown["text"])
        and reasoning.startswith(shown["reasoning"])
        and (not shown["text"] or shown["reasoning"] == reasoning)
    )


def _holds(renderer: LibraryRenderer, output: list[int], early: frozenset[str], tools: tuple[Tool, ...]) -> bool:
    pieces = renderer.pieces_of(tools, (), early)
    shown = {"reasoning": "", "text": ""}
    for token in output:
        for piece in pieces.feed([token]):
            assert isinstance(piece, tuple)
            shown[piece[0]] += piece[1]
    return shows_the_beginning(shown, renderer.parse(output, tools).message)


def _outputs(renderer: LibraryRenderer) -> Iterator[list[int]]:
    """Turns as the family prints them, and all short mixtures of the control tokens in them with plain words."""
    question = (Message("user", "Look."),)
    prompt = renderer.render(question, (TOOL,))
    marks: dict[int, None] = {}
    for turn in TURNS:
        try:
            printed = renderer.render((*question, turn, Message("tool", "found", None, (), "c", "look")), (TOOL,))
        except HarnessError:
            # Some families print one call a turn.
            continue
        output = printed[len(prompt) :]
        end = next((place for place, token in enumerate(output) if token in renderer.stop_ids), len(output))
        yield output[: end + 1]
        control = set(renderer.vocabulary.added.values()) | renderer.stop_ids
        marks |= dict.fromkeys(token for token in output if token in control)
    vocabulary = renderer.vocabulary
    marks |= dict.fromkeys(vocabulary.added[text] for text in THINKING if text in vocabulary.added)
    spelled = [vocabulary.plain(text) for text in THINKING if text not in vocabulary.added]
    few = [*spelled, *([mark] for mark in marks)][:MOST_MARKS]
    words = [vocabulary.plain(text) for text in ("one", " two ", "three")]
    for first, second, third in product(few, few, few):
        yield [*first, *words[0], *second, *words[1], *third, *words[2]]
        yield [*words[0], *first, *words[1], *second, *third, *words[2]]
