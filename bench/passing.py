"""A proxy that only passes a call on: what any process in Python costs that stands between, and records nothing.

`bench.proxy` runs it as it runs Polar's, beside it: ASGI under gunicorn, aiohttp towards the engine that POLAR_ENGINE
names. Nothing is read of a body, no key is looked up, and nothing is kept.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@asynccontextmanager
async def _connected(app: Starlette) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app.state.http:
        yield


async def _pass_on(request: Request) -> Response:
    headers = {"content-type": request.headers["content-type"]}
    url = os.environ["POLAR_ENGINE"] + request.url.path
    async with request.app.state.http.post(url, data=await request.body(), headers=headers) as reply:
        return Response(await reply.read(), reply.status, media_type=reply.content_type)


async def _ready(request: Request) -> Response:
    return Response()


app = Starlette(routes=[Route("/", _ready), Route("/{path:path}", _pass_on, methods=["POST"])], lifespan=_connected)
