"""A tokenizer as the `renderers` library wants it, in which no message can spell a control token.

The library prints layout and content as one text and encodes that, so that a layout's own `<tool_call>` becomes
one token. Content must not have that power: before it is handed over, whatever in it spells a control token is
marked, and where the marks are found again the spelling is encoded as plain text. Knows no family.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

from polar.renderers.layout import Vocabulary

MARK = f"z{secrets.token_hex(16)}"
"""Nobody outside this process knows it, so no content holds it; letters and digits pass every template unchanged."""


class GuardedTokenizer:
    """`encode`, `decode` and `convert_tokens_to_ids` over a Vocabulary, with content's spellings kept plain."""

    unk_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary, name: str, eos: str | None) -> None:
        self.name_or_path = name
        self.eos_token_id = None if eos is None else vocabulary.id_of(eos)
        self._vocabulary = vocabulary
        self._added = _any_of(vocabulary.added)
        self._guarded = _any_of(vocabulary.special)

    def watch(self, ids: Iterable[int]) -> None:
        """Take the added tokens among these ids for control tokens, too: a layout was seen to print them."""
        printed = set(ids)
        seen = {text for text, token in self._vocabulary.added.items() if token in printed}
        self._guarded = _any_of(self._vocabulary.special | seen)

    def unwatch(self) -> None:
        """Mark nothing any more, for a family that does not encode with this tokenizer."""
        self._guarded = None

    def guard(self, value: Any) -> Any:
        """Content, a text or anything made of texts, with its spellings of control tokens marked."""
        if isinstance(value, str):
            # The mark goes behind the first character: what is left spells nothing, and no edge of the text changes.
            return self._guarded.sub(lambda m: m[0][0] + MARK + m[0][1:], value) if self._guarded else value
        if isinstance(value, dict):
            return {self.guard(key): self.guard(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guard(each) for each in value]
        return value

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids of a printed text: spelled added tokens are meant, but for marked ones."""
        if MARK not in text or self._added is None:
            return self._vocabulary.template(text)
        parts: list[str | int] = []
        place = 0
        for found in self._added.finditer(text):
            parts += [text[place : found.start()].replace(MARK, ""), self._vocabulary.added[found[0]]]
            place = found.end()
        return self._vocabulary.encode([*parts, text[place:].replace(MARK, "")])

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        """Text of ids, control tokens spelled out."""
        return self._vocabulary.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token's spelling, None if there is none; of a list, a list."""
        if isinstance(tokens, str):
            return self._vocabulary.id_of(tokens)
        return [self._vocabulary.id_of(token) for token in tokens]


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Longest first, as tokenizers match; a text of one character is no layout's and cannot be marked."""
    found = sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, found))) if found else None
