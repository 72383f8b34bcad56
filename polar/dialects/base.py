"""A dialect is a provider's wire format, and this class is all that anyone outside knows of it.

The route a client chose tells the dialect; nothing is guessed from bodies. One instance serves all calls:
dialects hold no state between calls, and do no I/O. What the tokens are is the ledger's affair, what the
engine said is the engine adapter's; here JSON becomes a ModelRequest, and an Answer becomes JSON or events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from polar.messages import Answer, ModelRequest


class BadRequest(Exception):  # noqa: N818 - the name of the answer, as HTTP has it
    """The harness sent something that cannot be honoured: answered with 400 in the dialect's own shape."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Route:
    """One path of a dialect. `{model}` and the like are path parameters, as Starlette spells them."""

    path: str
    method: str = "POST"
    kind: str = "generate"
    """`generate` for a model call; else the auxiliary endpoint's name, answered by `auxiliary`."""


class Dialect(ABC):
    """One wire format: routes, where the secret travels, the shapes of answers, streams and errors."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    keepalive: ClassVar[bytes]
    """Bytes that keep a stream alive and that every client of this dialect ignores."""

    @abstractmethod
    def secret(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """The key a client sent, wherever this dialect puts it."""

    @abstractmethod
    def parse(self, body: dict[str, Any], path_params: Mapping[str, str]) -> ModelRequest:
        """Read tolerantly. Raises BadRequest, naming field and reason, only where no honest answer exists."""

    @abstractmethod
    def answer(self, request: ModelRequest, answers: list[Answer]) -> dict[str, Any]:
        """The whole response body; one Answer for each of `request.n`."""

    @abstractmethod
    def open_stream(self, request: ModelRequest, completion_id: str) -> Stream:
        """The event writer of one streamed answer."""

    @abstractmethod
    def error(self, status: int, code: str, message: str, *, field: str | None = None) -> dict[str, Any]:
        """The error body a client of this dialect understands."""

    @abstractmethod
    def error_event(self, status: int, code: str, message: str) -> bytes:
        """The same inside a stream that has begun."""

    @abstractmethod
    def auxiliary(self, kind: str, models: list[dict[str, Any]], path_params: Mapping[str, str]) -> dict[str, Any]:
        """The body of an auxiliary endpoint. `models`: [{"id", "context_length"}]. Raises BadRequest (404)."""


class Stream(ABC):
    """Turns the pieces of one answer into this dialect's events. `last` is withheld until the turn is stored."""

    @abstractmethod
    def reasoning(self, delta: str) -> Iterator[bytes]:
        """More reasoning; never after `text`."""

    @abstractmethod
    def text(self, delta: str) -> Iterator[bytes]:
        """More visible text."""

    @abstractmethod
    def finish(self, answer: Answer) -> Iterator[bytes]:
        """What `text` has not sent yet of the finished answer: reasoning, tool calls, remaining content."""

    @abstractmethod
    def last(self, answer: Answer) -> Iterator[bytes]:
        """Stop reason, usage and the terminal event."""


def sse(data: dict[str, Any] | bytes, event: str | None = None) -> bytes:
    """One server-sent event."""
    payload = data if isinstance(data, bytes) else orjson.dumps(data)
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + payload + b"\n\n"
