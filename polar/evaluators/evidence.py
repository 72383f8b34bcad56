"""What is kept of a verdict's evidence: bounded, and fit for the database, whoever the evaluator is.

Test output is the agent's to fill: it may be endless, hold zero bytes, or be a number that JSON does not know.
What to keep is each evaluator's choice; that it can be kept is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TEXT_LIMIT = 64_000
"""Characters kept of one text; the middle is cut out and said so."""
TOTAL_LIMIT = 512_000
"""Characters kept of all texts together; what comes later is left out and said so."""
ITEMS_LIMIT = 2_000
"""Entries kept of one list or object."""
DEPTH_LIMIT = 12


def clipped(text: str, limit: int = TEXT_LIMIT) -> str:
    """The text, or its head and tail with a line between that says what is cut."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[{len(text) - limit} characters cut out here]\n{text[-tail:]}"


def bounded(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON that Postgres takes, of at most about TOTAL_LIMIT characters."""
    return dict(_Keeper().value(dict(evidence), 0))


class _Keeper:
    """One walk over one piece of evidence, with what is left of its room."""

    def __init__(self) -> None:
        self._left = TOTAL_LIMIT

    def value(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            # A number of a million digits is a text of a million characters.
            return value if -(2**63) <= value < 2**63 else self.text(repr(value))
        if isinstance(value, float):
            return value if math.isfinite(value) else repr(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            return self.text(value.decode(errors="replace"))
        if depth >= DEPTH_LIMIT:
            return "[nested too deeply to be kept]"
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            items = list(value)
            kept = [self.value(item, depth + 1) for item in items[:ITEMS_LIMIT]]
            return [*kept, f"[{len(items) - ITEMS_LIMIT} more]"] if len(items) > ITEMS_LIMIT else kept
        return self.text(repr(value))

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for number, (name, item) in enumerate(value.items()):
            if number == ITEMS_LIMIT:
                kept["[more]"] = len(value) - ITEMS_LIMIT
                break
            kept[self.text(str(name))] = self.value(item, depth + 1)
        return kept

    def text(self, value: str) -> str:
        if self._left <= 0 and value:
            return "[left out: the evidence is full]"
        # Postgres refuses the zero character, and no encoder takes half a surrogate pair.
        clean = clipped(value, min(TEXT_LIMIT, max(self._left, 200))).replace("\0", "\N{REPLACEMENT CHARACTER}")
        clean = clean.encode(errors="replace").decode()
        self._left -= len(clean)
        return clean
