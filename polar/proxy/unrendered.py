"""What stands for a renderer where there is none: in canonical mode, before an engine whose tokenizer is not at hand.

It counts by a rule of thumb and prints nothing. It never makes a prompt and never reads an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polar.errors import EngineError
from polar.messages import Message, Tool
from polar.renderers.base import Bridge, Parsed, Piece, Renderer, TextPieces

CHARACTERS_PER_TOKEN = 4


class NoPieces(TextPieces):
    """Shows nothing before the answer is whole."""

    def feed(self, ids: list[int]) -> list[Piece]:
        return []


class NoRenderer(Renderer):
    """Of no family."""

    name = "none"
    SEES_IMAGES = True

    def __init__(self, folder: Path | None = None) -> None:
        """There is no folder to look into."""

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return False

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset()

    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> list[int]:
        raise EngineError("this lane is in canonical mode and renders nothing", code="engine_setup")

    def bridge(
        self,
        output_ids: list[int],
        appended: tuple[Message, ...],
        tools: tuple[Tool, ...] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Bridge | None:
        raise EngineError("this lane is in canonical mode and renders nothing", code="engine_setup")

    def pieces(self, tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> TextPieces:
        return NoPieces()

    def parse(self, output_ids: list[int], tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> Parsed:
        raise EngineError("this lane is in canonical mode and parses nothing", code="engine_setup")

    def decode(self, ids: list[int]) -> str:
        return ""

    def count(self, text: str) -> int:
        return -(-len(text) // CHARACTERS_PER_TOKEN)
