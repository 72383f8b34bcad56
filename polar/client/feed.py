"""Where a reader of the results feed is, and what a page has brought: no network here.

A page is read whole before its first result is handed out, so a trainer that takes minutes over one holds no connection
and no thread of the API. Results wait as bytes and are parsed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.client.calls import given
from polar.client.types import SessionResult

WAIT_SECONDS = 30.0
"""That one request of a follower waits for a result; the server allows 60."""
PAGE = 32
"""Results on a page: one of long traces is a megabyte or more."""


@dataclass(slots=True)
class Reader:
    """A place in the feed, with its filters."""

    after: str | None = None
    consumer: str | None = None
    group: str | None = None
    task_id: str | None = None
    full: bool = True
    limit: int = PAGE
    wait: float = 0.0
    """Seconds that a request waits for a result; 0 answers at once."""
    _lines: list[bytes] = field(default_factory=list)
    """Of the page that is being read, each whole."""
    _rest: list[bytes] = field(default_factory=list)
    """Pieces of a line that is not whole yet; one may have many, so they are not joined before its end."""

    def params(self) -> dict[str, Any]:
        """Of the next request."""
        view = "full" if self.full else "summary"
        named = given(after=self.after, consumer=self.consumer, group=self.group, task_id=self.task_id)
        if self.wait:
            named["wait"] = self.wait
        return {"view": view, "limit": self.limit, **named}

    def take(self, piece: bytes) -> None:
        """More of the body. Lines end at line feeds alone; texts inside may have other ends of lines."""
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._lines.append(b"".join((*self._rest, end)))
            self._rest = []
        if rest:
            self._rest.append(rest)

    def finish(self, following: str | None) -> Iterator[SessionResult]:
        """The page's results, the cursor moved past each; what came whole of a page that broke off is good.

        `following` is the server's own next cursor, None where the page broke off."""
        lines, self._lines = self._lines, []
        broken, self._rest = bool(self._rest) or following is None, []
        for number, line in enumerate(lines):
            lines[number] = b""  # a page of long traces is not kept while its last one is trained on
            result = SessionResult.read(orjson.loads(line))
            self.after = result.cursor
            yield result
        if not broken:
            self.after = following
