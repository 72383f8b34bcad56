"""A dialect is a provider's wire format, and this class is all that anyone outside knows of it.

The route a client chose tells the dialect; nothing is guessed from bodies. One instance serves all calls:
dialects hold no state between calls, and do no I/O. What the tokens are is the ledger's affair, what the
engine said is the engine adapter's; here JSON becomes a ModelRequest, and an Answer becomes JSON or events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from polar.messages import Answer, ModelRequest, ToolCall


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
    """`generate`: a model call. `count`: its prompt is counted and not sampled from. `models`, `model`: what there is.
    `no_socket`: a WebSocket is refused. `hello`: a probe, for which no key is needed. `absent`: the provider has this
    and Polar has not. `forget`: an earlier answer, by `{id}`, is deleted. Any other: the dialect's own view of one."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """What the path says beside its parameters, given to `parse` with them."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier call of the same session as it was on the wire, read only when it is looked into."""

    request: bytes
    answer: bytes

    def asked(self) -> dict[str, Any]:
        """The body of its request."""
        return _object(self.request)

    def answered(self) -> dict[str, Any]:
        """The body of its answer."""
        return _object(self.answer)


class Dialect(ABC):
    """One wire format: routes, where the secret travels, the shapes of answers, streams and errors."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    keepalive: ClassVar[bytes]
    """Bytes that keep a stream alive and that every client of this dialect ignores."""
    RESETS: ClassVar[bool] = True
    """After an error inside a stream the connection is reset, for clients that take a clean end for an answer."""
    REQUEST_ID: ClassVar[str] = "x-request-id"
    """The header in which clients of this dialect look for the id of a call."""

    def claims(self, headers: Mapping[str, str]) -> bool:
        """Whether a call is of this dialect, at a path that another one has too; asked in the order of names."""
        return True

    @abstractmethod
    def secret(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """The key a client sent, wherever this dialect puts it."""

    @abstractmethod
    def parse(self, body: dict[str, Any], params: Mapping[str, str]) -> ModelRequest:
        """Read tolerantly. Raises BadRequest, naming field and reason, only where no honest answer exists.

        `params`: the path's parameters, what its route fixes, and the query. Recorded bodies are read again with
        `model` alone."""

    @abstractmethod
    def answer(self, request: ModelRequest, answers: list[Answer]) -> dict[str, Any]:
        """The whole response body; one Answer for each of `request.n`."""

    @abstractmethod
    def open_stream(self, request: ModelRequest, completion_id: str) -> Stream:
        """The event writer of one streamed answer."""

    @abstractmethod
    def error(self, status: int, code: str, message: str, *, field: str | None = None) -> dict[str, Any]:
        """The error body a client of this dialect understands. `status` is what `status` returned."""

    @abstractmethod
    def error_event(self, status: int, code: str, message: str) -> bytes:
        """The same inside a stream that has begun."""

    def status(self, status: int, code: str) -> int:
        """The HTTP status by which this dialect's provider says it."""
        return status

    @abstractmethod
    def models(self, kind: str, models: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
        """The body of `models` and `model`. `models`: [{"id", "context_length"}]. Raises BadRequest (404)."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """The body of `count`: the prompt's exact length."""
        raise BadRequest("tokens cannot be counted in this dialect", status=404)

    def cites(self, body: dict[str, Any]) -> Sequence[str]:
        """The ids of earlier answers, or of parts of them, that `body` names instead of repeating them."""
        return ()

    def whole(self, body: dict[str, Any], params: Mapping[str, str], cited: Mapping[str, Earlier]) -> dict[str, Any]:
        """`body` as it is recorded and parsed: with what it cites in its place, and with what only its route says.

        `cited`: those of `cites` that are there. Raises BadRequest for the others."""
        return body

    def completion_id(self, wire_id: str) -> str:
        """The completion that an id of this dialect's answers names."""
        return f"cmp-{wire_id.rpartition('_')[2].rpartition('-')[2]}"

    def recorded(self, kind: str, wire_id: str, earlier: Earlier | None, params: Mapping[str, str]) -> dict[str, Any]:
        """The body of a route of `kind` about an earlier answer. Raises BadRequest: 404 where `earlier` is None."""
        raise BadRequest("earlier answers cannot be asked for in this dialect", status=404)


class Stream(ABC):
    """Turns the pieces of one answer into this dialect's events. `last` is withheld until the turn is stored.

    Keeps count of what has gone out, so that `finish` sends the rest of the finished answer whatever was streamed."""

    content_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"

    def __init__(self, request: ModelRequest, completion_id: str) -> None:
        self.request = request
        self.completion_id = completion_id
        self._started = False
        self._sent_reasoning = 0
        self._sent_text = 0
        self._sent_calls = 0

    def start(self, prompt_tokens: int) -> Iterator[bytes]:
        """What comes before everything else; once."""
        if not self._started:
            self._started = True
            yield from self._start(prompt_tokens)

    def reasoning(self, delta: str) -> Iterator[bytes]:
        """More reasoning; never after text."""
        self._sent_reasoning += len(delta)
        yield from self._reasoning(delta)

    def text(self, delta: str) -> Iterator[bytes]:
        """More visible text."""
        self._sent_text += len(delta)
        yield from self._text(delta)

    def call(self, call: ToolCall) -> Iterator[bytes]:
        """The next tool call, whole and with its id."""
        yield from self._call(self._sent_calls, call)
        self._sent_calls += 1

    def finish(self, answers: list[Answer]) -> Iterator[bytes]:
        """What has not been sent yet of the finished answer, in its order."""
        answer = answers[0]
        yield from self.start(answer.prompt_tokens)
        if rest := (answer.message.reasoning or "")[self._sent_reasoning :]:
            yield from self.reasoning(rest)
        if rest := answer.message.content[self._sent_text :]:
            yield from self.text(rest)
        for call in answer.message.tool_calls[self._sent_calls :]:
            yield from self.call(call)

    @abstractmethod
    def last(self, answers: list[Answer]) -> Iterator[bytes]:
        """Stop reason, usage and the terminal event."""

    def broken(self, dialect: Dialect, status: int, code: str, message: str) -> bytes:
        """The event that breaks off a stream that has begun."""
        return dialect.error_event(status, code, message)

    @abstractmethod
    def _start(self, prompt_tokens: int) -> Iterator[bytes]: ...

    @abstractmethod
    def _reasoning(self, delta: str) -> Iterator[bytes]: ...

    @abstractmethod
    def _text(self, delta: str) -> Iterator[bytes]: ...

    @abstractmethod
    def _call(self, index: int, call: ToolCall) -> Iterator[bytes]: ...


def sse(data: dict[str, Any] | bytes, event: str | None = None) -> bytes:
    """One server-sent event."""
    payload = data if isinstance(data, bytes) else orjson.dumps(data)
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + payload + b"\n\n"


def _object(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = orjson.loads(data)
    return value
