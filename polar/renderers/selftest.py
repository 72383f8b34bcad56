"""A renderer tried on conversations before anything is trained on what it prints.

The ledger never prints a sampled turn again, so a mistake where turns are joined would not show anywhere else: the
engine sees what it is sent. Here the policy writes exactly what the template prints; then prompt, output and bridge
must be the text of the whole conversation printed at once. Where the template itself prints an earlier turn
differently later on, as many do with reasoning, there is nothing to compare.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from polar.errors import SessionError
from polar.messages import Message, Tool, ToolCall
from polar.renderers.base import TAIL, Renderer

CONVERSATIONS = 50
TURNS = 4
WORDS = ("look", "ünï", "日本", "🙂", "x = 1", "a\n\n  b", "<|im_end|>", "</think>", "<|user|>", '{"k": 1}', "1.")
ARGUMENTS = ("{}", '{"key": "a"}', '{"key": "a\\nb", "n": 2}', '{"flag": true, "list": [1, "x"]}')
SCHEMA = {
    "type": "object",
    "properties": {
        "key": {"type": "string"},
        "n": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
    },
}
TOOLS = tuple(
    Tool(name, raw={"name": name, "description": "Does it.", "parameters": SCHEMA}) for name in ("look", "run_it")
)
SHOWN = 40


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What came of it."""

    compared: int
    """Turns after which both ways could be compared."""
    unbridged: int
    """Turns that the renderer would not go on from; the ledger begins anew there."""
    difference: str | None
    """The first case in which it went wrong."""

    def summary(self) -> str:
        """One line for people."""
        return self.difference or f"{self.compared} turns alike, {self.unbridged} begin anew"


@lru_cache(maxsize=64)
def self_test(renderer: Renderer) -> SelfTest:
    """Try a renderer, once per process; takes tenths of a second."""
    compared = unbridged = 0
    for seed in range(CONVERSATIONS):
        for joined, difference in _try(renderer, random.Random(seed)):
            compared += joined
            unbridged += not joined
            if difference is not None:
                return SelfTest(compared, unbridged, f"conversation {seed}, {difference}")
    nothing = None if compared else "there is no turn after which it can be continued"
    return SelfTest(compared, unbridged, nothing)


def doubt_of(renderer: Renderer) -> str | None:
    """Why a strict task must not be served with this renderer, or None."""
    difference = self_test(renderer).difference
    if difference is None:
        return None
    return (
        f"renderer {renderer.name} failed its self-test and takes no strict task: {difference}; "
        "name another `renderer` for this lane's engine"
    )


def _try(renderer: Renderer, dice: random.Random) -> Iterator[tuple[bool, str | None]]:
    """After each turn: whether the renderer went on from it, and what was wrong with that."""
    tools = TOOLS[: dice.randrange(3)]
    history: tuple[Message, ...] = (Message("user", _text(dice)),)
    if dice.random() < 0.5:
        history = (Message("system", _text(dice)), *history)
    try:
        prompt = renderer.render(history, tools)
        for number in range(TURNS):
            turn, following = _turn(dice, number, tools)
            history = (*history, turn, *following)
            whole = renderer.render(history, tools)
            rest = whole[len(prompt) :]
            end = next((place for place, token in enumerate(rest) if token in renderer.stop_ids), None)
            if whole[: len(prompt)] != prompt or end is None:
                prompt = whole
                continue
            output = rest[: end + 1]
            message = renderer.parse(output, tools, prompt[-TAIL:]).message
            if len(message.tool_calls) < len(turn.tool_calls) > 1:
                # A family whose first call ends the turn never samples two, so its history of two proves nothing.
                prompt = whole
                continue
            wrong = _misread(turn, message) or _streamed(renderer, output, message, tools, prompt)
            bridge = renderer.bridge(output, following, tools, prompt[-TAIL:])
            if bridge is None:
                yield False, wrong
                prompt = whole
                continue
            prompt = [*prompt, *output[: len(output) - bridge.trim], *bridge.ids]
            yield True, wrong or _unlike(renderer.decode(prompt), renderer.decode(whole), history)
    except SessionError:
        # This family's template does not take such a history, so no prompt can be wrong.
        return


def _turn(dice: random.Random, number: int, tools: tuple[Tool, ...]) -> tuple[Message, tuple[Message, ...]]:
    """What the policy says, and what the harness appends."""
    reasoning = _text(dice) if dice.random() < 0.4 else None
    if not tools or dice.random() < 0.3:
        return Message("assistant", _text(dice), reasoning), (Message("user", _text(dice)),)
    calls = tuple(
        ToolCall(f"call_{number:024x}_{index}", dice.choice(tools).name, dice.choice(ARGUMENTS))
        for index in range(dice.choice((1, 1, 2)))
    )
    results = tuple(Message("tool", _text(dice), None, (), call.id, call.name) for call in calls)
    return Message("assistant", _text(dice) if dice.random() < 0.5 else "", reasoning, calls), results


def _text(dice: random.Random) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, 6)))


def _misread(turn: Message, message: Message) -> str | None:
    """What is wrong with how a printed turn's calls are read back. Some templates print a value so that another comes
    back; that is theirs to answer for, and no harm to a turn that was sampled."""
    written, read = ([(call.name, *json.loads(call.arguments)) for call in each.tool_calls] for each in (turn, message))
    return None if read == written else f"printed the calls {written} and read back {read}"


def _streamed(
    renderer: Renderer, output: list[int], message: Message, tools: tuple[Tool, ...], prompt: list[int]
) -> str | None:
    """What is wrong with how a printed turn is streamed: only its beginning may ever be shown."""
    pieces = renderer.pieces(tools, prompt[-TAIL:])
    shown = {"reasoning": "", "text": ""}
    for token in output:
        for piece in pieces.feed([token]):
            if not isinstance(piece, ToolCall):
                shown[piece[0]] += piece[1]
    whole = {"reasoning": message.reasoning or "", "text": message.content}
    for part, text in shown.items():
        if not whole[part].startswith(text):
            return f"streamed {part} {text[-SHOWN:]!r}, which is not how {whole[part][:SHOWN]!r} begins"
    return None


def _unlike(joined: str, whole: str, history: tuple[Message, ...]) -> str | None:
    if joined == whole:
        return None
    shared = min(len(joined), len(whole))
    place = next((at for at, (a, b) in enumerate(zip(joined, whole, strict=False)) if a != b), shared)
    roles = " ".join(f"{each.role}+call" if each.tool_calls else each.role for each in history)
    return (
        f"after {roles}: continued {joined[place : place + SHOWN]!r}, printed at once {whole[place : place + SHOWN]!r}"
    )
