"""What a client sees of a call: the whole answer, or a stream that ends only once the turn is recorded.

Watches for clients that hang up. Shapes are the dialect's, tokens are `calls`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polar.dialects.base import Dialect, Stream
from polar.messages import ModelRequest, ToolCall
from polar.proxy import metrics
from polar.proxy.calls import ModelCalls
from polar.proxy.flights import Flight, Piece
from polar.proxy.limits import Limits
from polar.proxy.wire import WireError, wire_error

UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def error_response(dialect: Dialect, error: WireError) -> Response:
    """An error in the dialect's own shape."""
    status, body = _refusal(dialect, error)
    return json_response(body, status, error.headers())


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON, by orjson."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _refusal(dialect: Dialect, error: WireError) -> tuple[int, dict[str, Any]]:
    status = dialect.status(error.status, error.code)
    return status, dialect.error(status, error.code, error.message, field=error.field)


class Relay(Response):
    """The response to one model call; an ASGI application, since it must hear of a hang-up while it waits."""

    def __init__(
        self, calls: ModelCalls, flight: Flight, dialect: Dialect, limits: Limits, request: ModelRequest
    ) -> None:
        """`request`: as this client asked it, who may have joined the flight of one that asked it otherwise."""
        super().__init__()
        self._calls = calls
        self._flight = flight
        self._dialect = dialect
        self._limits = limits
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = metrics.telling(send, self._dialect.name)
        left = asyncio.create_task(_left(receive))
        # Whoever waits for news looks whether its client is still there.
        left.add_done_callback(lambda _: self._flight.wake())
        try:
            whole = await (self._send_stream(send, left) if self._request.stream else self._send_whole(send, left))
            if whole and not left.done():
                self._calls.delivered(self._flight)
        finally:
            left.cancel()
            self._flight.leave()

    async def _send_whole(self, send: Send, left: asyncio.Task[None]) -> bool:
        task = self._flight.task
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        if (error := task.exception()) is not None:
            await self._refuse(send, wire_error(error))
            return False
        await self._send_json(send, 200, self._dialect.answer(self._request, task.result()))
        return True

    async def _send_stream(self, send: Send, left: asyncio.Task[None]) -> bool:
        """Whether the terminal event was sent."""
        flight, task = self._flight, self._flight.task
        stream = self._dialect.open_stream(self._request, flight.id)
        shown, begun = 0, False
        while True:
            heard = await flight.news(shown, self._limits.keepalive)
            if left.done():
                return False
            if task.done() and (error := task.exception()) is not None:
                return await self._break_off(send, wire_error(error), stream if begun else None)
            pieces, shown = flight.pieces[shown:], len(flight.pieces)
            silent = not heard and not pieces and not task.done()
            events: list[bytes] = []
            if flight.prompt_tokens is not None and (pieces or silent):
                events += stream.start(flight.prompt_tokens)
            for piece in pieces:
                events += _piece(stream, piece)
            if task.done():
                events += [*stream.finish(task.result()), *stream.last(task.result())]
            elif silent:
                events.append(self._dialect.keepalive)
            if events:
                if not begun:
                    headers = self._head(stream.content_type)
                    await send({"type": "http.response.start", "status": 200, "headers": [*headers, *UNBUFFERED]})
                    begun = True
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": not task.done()})
            if task.done() and events:
                return True

    async def _break_off(self, send: Send, error: WireError, stream: Stream | None) -> bool:
        """An error before the first byte has its status. After it, the error event goes out and, unless that would
        be worse for this dialect's clients, the response is left unfinished, upon which the server resets the
        connection: a stream that ends cleanly is taken for an answer."""
        if stream is not None:
            status = self._dialect.status(error.status, error.code)
            event = stream.broken(self._dialect, status, error.code, error.message)
            await send({"type": "http.response.body", "body": event, "more_body": self._dialect.RESETS})
        else:
            await self._refuse(send, error)
        return False

    async def _refuse(self, send: Send, error: WireError) -> None:
        status, body = _refusal(self._dialect, error)
        await self._send_json(send, status, body, error.headers())

    async def _send_json(self, send: Send, status: int, value: Any, more: Mapping[str, str] | None = None) -> None:
        body = orjson.dumps(value)
        headers = [*self._head(b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), text.encode()) for name, text in (more or {}).items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _head(self, content_type: bytes) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", content_type), (self._dialect.REQUEST_ID.encode(), self._flight.id.encode())]


def _piece(stream: Stream, piece: Piece) -> Iterator[bytes]:
    if isinstance(piece, ToolCall):
        return stream.call(piece)
    kind, text = piece
    return stream.reasoning(text) if kind == "reasoning" else stream.text(text)


async def _left(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
