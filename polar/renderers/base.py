"""A renderer turns messages into token ids and sampled ids back into a message, for one model family.

The one rule that makes traces exact: a sampled message is never rendered again. `render` makes the first
prompt of a conversation; `bridge` makes only what comes after a turn that the policy sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from polar.messages import Message, Tool, ToolCall

TAIL = 512
"""How many ids of a prompt's end tell what its generation prompt opened."""


class Tokenizer(Protocol):
    """What a renderer needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled output as a message. Tool-call ids are empty: the proxy mints them."""

    message: Message
    flags: tuple[str, ...] = ()
    """`malformed_tool_call`, `unclosed_reasoning`."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """How a prompt goes on after a sampled turn."""

    ids: list[int]
    trim: int = 0
    """How many ids at the end of the output are not kept: a stop that history spells differently, as gpt-oss and
    GLM do. They were sampled all the same, and whoever merges turns has to know that they are gone."""


Piece = tuple[Literal["reasoning", "text"], str] | ToolCall
"""A tool call comes whole, with an empty id."""


class TextPieces(ABC):
    """Reads one sampled output as it comes and gives out what a person may already see.

    Held back: what might yet become a tool call, and unfinished characters. What `parse` makes of the whole
    output always begins with what was given out here: its reasoning, its text, its tool calls."""

    @abstractmethod
    def feed(self, ids: list[int]) -> list[Piece]:
        """New pieces after `ids`, in order."""


class Renderer(ABC):
    """One model family's layout of conversations."""

    name: ClassVar[str]
    SEES_IMAGES: ClassVar[bool] = False
    """Otherwise the words that stand for a picture are printed in its place."""

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """`folder` holds tokenizer.json and the like. Raises SpecError."""

    @classmethod
    @abstractmethod
    def fits(cls, folder: Path) -> bool:
        """Whether this is the layout that the folder's own chat template prints."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant turn."""

    @abstractmethod
    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> list[int]:
        """The whole prompt with the generation prompt at its end. Raises SessionError for a history that the family's
        template refuses."""

    @abstractmethod
    def bridge(
        self,
        output_ids: list[int],
        appended: tuple[Message, ...],
        tools: tuple[Tool, ...] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Bridge | None:
        """What follows a sampled turn: its close if it was not sampled, `appended`, the generation prompt.

        `appended` holds no assistant message that the policy sampled; `prompt_ids` is the end of what the turn was
        sampled from, `TAIL` of it being enough. None: this history cannot be continued token for token."""

    @abstractmethod
    def parse(self, output_ids: list[int], tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> Parsed:
        """Never fails: what cannot be read as a tool call stays text, and is flagged.

        `prompt_ids` as of `bridge`: some generation prompts open the reasoning themselves."""

    @abstractmethod
    def pieces(self, tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> TextPieces:
        """A reader of one output that is still being sampled."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Text of ids, for people and streams."""

    @abstractmethod
    def count(self, text: str) -> int:
        """Tokens of a plain text."""

    def size(self) -> int | None:
        """One more than the highest id that the tokenizer has; None if that is not known."""
        return None
