"""The task the packaged checkpoint was trained on: look a key up with a tool, then say what came back.

Holds the texts of the task in the tiny model's chat layout, and a grader. It leaves rendering of arbitrary
conversations to the gateway's renderers and the sampling to the engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEYS = "abcdefgh"
SYSTEMS = (
    "Use the lookup tool.",
    "Use the lookup tool.",
    "You have a lookup tool. Use it.",
    "Look the key up, then answer.",
    "",
)
TOOL = {
    "name": "lookup",
    "description": "Look a key up",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
END = "<|im_end|>"

Sampler = Callable[[Sequence[str]], list[str]]
"""Takes prompts as text and gives the sampled answers as text, each with its end token where one was sampled."""


@dataclass(frozen=True)
class Episode:
    """One instance of the task: the key asked for and the two digits that the tool will answer."""

    key: str
    value: str
    system: str = SYSTEMS[0]

    def first_prompt(self) -> str:
        """The text up to the place where the model must call the tool."""
        lead = f"{self.system}\n\n" if self.system else ""
        tool = json.dumps(TOOL, separators=(",", ":"), ensure_ascii=False)
        return (
            f"<|im_start|>system\n{lead}# Tools\n{tool}\n\n"
            f'Call a tool with <tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>{END}\n'
            f"<|im_start|>user\nfind {self.key}{END}\n<|im_start|>assistant\n"
        )

    def call(self) -> str:
        """The one right first answer."""
        return call_text(self.key)

    def bridge(self) -> str:
        """The text between the first answer and the place where the second one starts."""
        return f"\n<|im_start|>user\n<tool_response>\n{self.value}\n</tool_response>{END}\n<|im_start|>assistant\n"

    def answer(self) -> str:
        """The one right second answer."""
        return f"{self.value}{END}"


def call_text(key: str) -> str:
    """A lookup call as the chat layout prints it, end token included."""
    body = json.dumps({"name": "lookup", "arguments": {"key": key}}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>{END}"


def draw(rng: random.Random, plain: bool = False) -> Episode:
    """A random episode; `plain` keeps to the first system text instead of one of the variations."""
    system = SYSTEMS[0] if plain else rng.choice(SYSTEMS)
    return Episode(rng.choice(KEYS), f"{rng.randrange(100):02d}", system)


def grade(sample: Sampler, episodes: Sequence[Episode]) -> tuple[float, float]:
    """The share of episodes with the right call, and the share that also end in the right answer."""
    calls = sample([episode.first_prompt() for episode in episodes])
    good = [episode for episode, call in zip(episodes, calls, strict=True) if call == episode.call()]
    answers = sample([episode.first_prompt() + episode.call() + episode.bridge() for episode in good])
    solved = sum(answer == episode.answer() for episode, answer in zip(good, answers, strict=True))
    return len(good) / len(episodes), solved / len(episodes)
