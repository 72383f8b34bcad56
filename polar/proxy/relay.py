"""What a client sees of a call: the whole answer, or a stream that ends only once the turn is recorded.

Watches for clients that hang up. Shapes are the dialect's, tokens are `calls`'.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polar.dialects.base import Dialect, Stream
from polar.proxy.calls import ModelCalls
from polar.proxy.flights import Flight
from polar.proxy.limits import Limits
from polar.proxy.wire import WireError, wire_error

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def error_response(dialect: Dialect, error: WireError) -> Response:
    """An error in the dialect's own shape."""
    body = dialect.error(error.status, error.code, error.message, field=error.field)
    return json_response(body, error.status)


def json_response(body: Any, status: int = 200) -> Response:
    """JSON, by orjson."""
    return Response(orjson.dumps(body), status, media_type="application/json")


class Relay(Response):
    """The response to one model call; an ASGI application, since it must hear of a hang-up while it waits."""

    def __init__(self, calls: ModelCalls, flight: Flight, dialect: Dialect, limits: Limits, *, stream: bool) -> None:
        super().__init__()
        self._calls = calls
        self._flight = flight
        self._dialect = dialect
        self._limits = limits
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(_left(receive))
        # Whoever waits for news looks whether its client is still there.
        left.add_done_callback(lambda _: self._flight.wake())
        try:
            whole = await (self._send_stream(send, left) if self._stream else self._send_whole(scope, send, left))
            if whole and not left.done():
                self._calls.delivered(self._flight)
        finally:
            left.cancel()
            self._flight.leave()

    async def _send_whole(self, scope: Scope, send: Send, left: asyncio.Task[None]) -> bool:
        task = self._flight.task
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        if (error := task.exception()) is not None:
            await self._refuse(send, wire_error(error))
            return False
        await _send_json(send, 200, orjson.dumps(self._dialect.answer(self._flight.asked.request, task.result())))
        return True

    async def _send_stream(self, send: Send, left: asyncio.Task[None]) -> bool:
        """Whether the terminal event was sent."""
        flight, task = self._flight, self._flight.task
        stream = self._dialect.open_stream(flight.asked.request, flight.id)
        shown, begun = 0, False
        while True:
            heard = await flight.news(shown, self._limits.keepalive)
            if left.done():
                return False
            if task.done() and (error := task.exception()) is not None:
                await self._break_off(send, wire_error(error), begun=begun)
                return False
            pieces, shown = flight.pieces[shown:], len(flight.pieces)
            events = [event for kind, text in pieces for event in _piece(stream, kind, text)]
            if task.done():
                answer = task.result()[0]
                events += [*stream.finish(answer), *stream.last(answer)]
            elif not events and not heard:
                events = [self._dialect.keepalive]
            if events:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    begun = True
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": not task.done()})
            if task.done() and events:
                return True

    async def _break_off(self, send: Send, error: WireError, *, begun: bool) -> None:
        """An error before the first byte has its status. After it, the error event goes out and the response is left
        unfinished, upon which the server resets the connection: a stream that ends cleanly is taken for an answer."""
        if not begun:
            await self._refuse(send, error)
            return
        event = self._dialect.error_event(error.status, error.code, error.message)
        await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _refuse(self, send: Send, error: WireError) -> None:
        body = self._dialect.error(error.status, error.code, error.message, field=error.field)
        await _send_json(send, error.status, orjson.dumps(body))


def _piece(stream: Stream, kind: str, text: str) -> list[bytes]:
    return list(stream.reasoning(text) if kind == "reasoning" else stream.text(text))


async def _left(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
