"""Pieces that renderers share: encoding with specials by id only, and reading text out of ids as they come.

Knows no model family and no layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from polar.errors import SpecError

UNFINISHED = "\ufffd"
"""What byte-level decoding prints for a character whose last bytes are not there yet."""


class Vocabulary:
    """A tokenizer.json used in two ways: added tokens are written by id alone, text is always plain text.

    Text that spells an added token therefore never becomes one: nobody can open a turn from inside a message."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            data = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise SpecError.at("tokenizer", f"{path} cannot be read: {error}") from error
        self._whole = Tokenizer.from_str(orjson.dumps(data).decode())
        added = data.get("added_tokens") or []
        self.added: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special: frozenset[str] = frozenset(token["content"] for token in added if token.get("special"))
        """Those of `added` that are the model's control tokens, by the tokenizer's own word."""
        self._size: int | None = None
        self._plain = Tokenizer.from_str(orjson.dumps(data | {"added_tokens": [], "post_processor": None}).decode())

    def encode(self, parts: Iterable[str | int]) -> list[int]:
        """Ids of a layout: an int stands for itself, and texts between two ints are encoded as one."""
        ids: list[int] = []
        text: list[str] = []
        for part in parts:
            if isinstance(part, str):
                text.append(part)
                continue
            ids += self.plain("".join(text))
            text.clear()
            ids.append(part)
        return ids + self.plain("".join(text))

    def plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special."""
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    def template(self, text: str) -> list[int]:
        """Ids of a printed template, in which spelled added tokens are meant."""
        ids: list[int] = self._whole.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, token: str) -> int | None:
        """The id of a token by its spelling."""
        found: int | None = self._whole.token_to_id(token)
        return found

    def decode(self, ids: list[int]) -> str:
        """The text of ids, specials spelled out."""
        return self._whole.decode(ids, skip_special_tokens=False)

    def size(self) -> int:
        """One more than the highest id."""
        if self._size is None:
            self._size = max(self._whole.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return self._size


class Detokenizer:
    """Text of ids as they come, at a cost that does not grow with the output.

    Each step decodes only from the last point where the text was whole; a byte-level token may end in the
    middle of a character, so text that ends in one waits for more."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, ids: list[int]) -> str:
        """The text that `ids` complete."""
        self._ids += ids
        before = self._vocabulary.decode(self._ids[self._prefix : self._read])
        after = self._vocabulary.decode(self._ids[self._prefix :])
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return after[len(before) :]


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text` might be the beginning of one of `marks`."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
