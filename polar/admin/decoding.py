"""The text of single tokens, through the tokenizer that a lane's engine uses, where this machine has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from sqlalchemy.orm import Session
from tokenizers import Tokenizer

from polar.models import Lane

Texts = Callable[[Sequence[int]], list[str]]
BROKEN = "\ufffd"


def texts_for(db: Session, lane_name: str | None) -> Texts | None:
    """What turns ids into texts, one for each; None where no tokenizer is at hand."""
    lane = db.get(Lane, lane_name) if lane_name else None
    if lane is None:
        return None
    named = lane.engine.get("tokenizer") or lane.passport.get("tokenizer")
    path = Path(str(named)) / "tokenizer.json" if named else None
    if path is None or not path.is_file():
        return None
    return _texts(str(path), path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _texts(path: str, changed: int) -> Texts | None:
    # `changed` is part of the key: a tokenizer that was replaced is read anew.
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception:  # noqa: BLE001 - the library raises nothing narrower for a file that it cannot read
        return None

    @lru_cache(maxsize=200_000)
    def text(token: int) -> str:
        shown: str = tokenizer.decode([token], skip_special_tokens=False)
        # Part of a character has no text of its own: its name in the vocabulary says which bytes it is.
        return tokenizer.id_to_token(token) or BROKEN if BROKEN in shown else shown

    def texts(ids: Sequence[int]) -> list[str]:
        return [text(token) for token in ids]

    return texts


def whole_text(texts: Texts, ids: Sequence[int]) -> str:
    """The ids in a row, for reading."""
    return "".join(texts(ids))
