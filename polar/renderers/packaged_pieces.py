"""What of a sampled output may be shown before it is whole, for families that the `renderers` library reads.

The library reads whole outputs. Reading them anew at every token would cost the square of their length, so it is
done only where something may have changed: at a control token, and where a part begins. In between, plain tokens
are more of the part they stand in. Text is shown up to the first control token in it, tool calls not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from polar.renderers.base import Parsed, Piece, TextPieces
from polar.renderers.layout import UNFINISHED, Detokenizer, Vocabulary, held_back

LOOKS = 64
"""Readings of one output; one with more control tokens than this is shown when it is whole."""
THINKING = ("<think>", "</think>")
Part = Literal["start", "reasoning", "text", "done"]


class LibraryPieces(TextPieces):
    """Reasoning, then text, each only if the family lets it be known early."""

    def __init__(
        self, vocabulary: Vocabulary, read: Callable[[list[int]], Parsed], early: frozenset[str], stops: frozenset[int]
    ) -> None:
        """`read` parses an output as `Renderer.parse` does; `early` names the parts that may be shown."""
        self._vocabulary = vocabulary
        self._control = frozenset(vocabulary.added.values()) | stops
        self._stops = stops
        self._spelled = tuple(mark for mark in THINKING if mark not in vocabulary.added)
        """Marks that plain tokens spell in this family."""
        self._read = read
        self._early = early
        self._ids: list[int] = []
        self._part: Part = "start" if early else "done"
        self._shown = {"reasoning": "", "text": ""}
        self._waiting = ""
        self._looks = 0
        self._run = 0
        """Where the plain tokens after the last control token begin."""
        self._detokenizer = Detokenizer(vocabulary)

    def feed(self, ids: list[int]) -> list[Piece]:
        found: list[Piece] = []
        for token in ids:
            if self._part == "done":
                break
            self._ids.append(token)
            if token in self._control:
                self._run = len(self._ids)
            if self._part == "start" or token in self._control:
                self._look(token, found)
            else:
                self._waiting += self._detokenizer.feed([token])
                if any(mark in self._waiting for mark in self._spelled):
                    self._part = self._part if self._part == "reasoning" or self._shown["text"] else "start"
                    self._look(token, found)
        self._let_go(found)
        return found

    def _look(self, token: int, found: list[Piece]) -> None:
        """Read all there is, and see in which part the next token will stand."""
        if self._part == "text" or token in self._stops:
            # What follows a control token inside the text is the parser's to judge, once it has everything.
            if token in self._control:
                self._let_go(found)
            self._part = "done"
            return
        if self._part == "start" and not self._vocabulary.decode([token]).strip():
            return
        self._looks += 1
        parsed = self._read(self._ids)
        message, opened = parsed.message, "unclosed_reasoning" in parsed.flags
        reasoning, text = message.reasoning or "", message.content
        late = message.tool_calls or "malformed_tool_call" in parsed.flags or (opened and self._part == "reasoning")
        if self._looks > LOOKS or late:
            self._part = "done"
        elif token not in self._control and (reasoning + text).endswith(UNFINISHED):
            return
        elif opened:
            self._enter("reasoning", reasoning)
        elif reasoning.startswith(self._shown["reasoning"]):
            self._part, self._waiting = "reasoning", reasoning[len(self._shown["reasoning"]) :]
            self._let_go(found, whole=True)
            self._part = "start"
            if text and token in self._control:
                self._part = "done"
            elif text:
                self._enter("text", text)
        else:
            self._part = "done"

    def _enter(self, part: Literal["reasoning", "text"], read: str) -> None:
        shown = self._shown[part]
        if part not in self._early or not read.startswith(shown):
            self._part = "done"
            return
        self._detokenizer = Detokenizer(self._vocabulary)
        begun = self._detokenizer.feed(self._ids[self._run :])
        # A part is read without the space at its end, which the token that begins it may have.
        self._part, self._waiting = part, read[len(shown) :] + begun[len(begun.rstrip()) :]

    def _let_go(self, found: list[Piece], *, whole: bool = False) -> None:
        """Give out what is certain of the part: space at its end may turn out to belong to no part."""
        if self._part not in ("reasoning", "text"):
            return
        part: Literal["reasoning", "text"] = "text" if self._part == "text" else "reasoning"
        sure = len(self._waiting) if whole else len(self._waiting) - held_back(self._waiting, self._spelled)
        certain = self._waiting[:sure] if whole else self._waiting[:sure].rstrip()
        if not self._shown[part]:
            certain = certain.lstrip()
        if not certain or part not in self._early:
            return
        self._waiting = self._waiting[self._waiting.index(certain) + len(certain) :]
        self._shown[part] += certain
        found.append((part, certain))
