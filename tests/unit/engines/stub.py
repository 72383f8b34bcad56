"""A server whose answers a test writes, and one call of an adapter against it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp import web

from polar.engines.base import Engine

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(member: type[Engine], routes: dict[str, Handler], work: Callable[[Engine], Awaitable[T]]) -> T:
    """Do `work` with an adapter of a server that has these POST routes, and GET routes for those that say so."""

    async def main() -> T:
        app = web.Application()
        for path, handler in routes.items():
            method, _, where = path.rpartition(" ")
            app.router.add_route(method or "POST", where, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with aiohttp.ClientSession() as http:
                return await work(member(f"http://127.0.0.1:{runner.addresses[0][1]}", http))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def answering(value: Any, status: int = 200, seen: list[Any] | None = None) -> Handler:
    """A handler with one JSON answer, which notes what it was asked."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(await request.json())
        return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")

    return handle


def streaming(*events: Any, seen: list[Any] | None = None, done: bool = True) -> Handler:
    """A handler that sends these as events."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(await request.json())
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for event in events:
            await reply.write(b": ping\n\ndata: " + orjson.dumps(event) + b"\n\n")
        if done:
            await reply.write(b"data: [DONE]\n\n")
        return reply

    return handle
