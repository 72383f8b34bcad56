"""The proxy as an ASGI application: which paths there are, and what every call of this process shares.

The route tells the dialect. What happens at a route is `door`'s affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from polar.db import connect_async
from polar.dialects import DIALECTS
from polar.dialects.base import Dialect
from polar.proxy.calls import ModelCalls
from polar.proxy.door import Door
from polar.proxy.ledgers import Ledgers
from polar.proxy.limits import Limits
from polar.proxy.pool import EnginePool
from polar.proxy.reads import Reads
from polar.proxy.recorder import Recorder
from polar.proxy.relay import json_response
from polar.proxy.store import Store
from polar.registry import load
from polar.settings import Settings

IN_PATH = "/s/{key}"
"""Before any path of any dialect, for harnesses that cannot set a key."""


def create_app(settings: Settings, limits: Limits | None = None) -> Starlette:
    """Wire everything; nothing is connected before the server's event loop runs."""
    limits = limits or Limits()
    dialects = [load("dialect", DIALECTS, name, Dialect)() for name in sorted(DIALECTS)]  # type: ignore[type-abstract]
    paths = [Path(path, health, methods=["GET"]) for path in ("/", "/health", IN_PATH)]
    for dialect in dialects:
        door = Door(dialect, limits, settings.max_body_mb * 2**20)
        for route in dialect.routes:
            for prefix in ("", IN_PATH):
                paths.append(Path(prefix + route.path, door.endpoint(route), methods=[route.method]))
    known = [f"{route.method} {route.path}" for dialect in dialects for route in dialect.routes]

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        message = f"there is no {request.method} {request.url.path} here; there are {', '.join(known)}"
        kind = "method_not_allowed" if status == 405 else "not_found"
        return json_response({"error": {"message": message, "type": kind, "param": None, "code": kind}}, status)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        database, reads = connect_async(settings.database_url, pool_size=1), Reads(settings.database_url, limits.commit)
        pool, recorder = EnginePool(), Recorder(database, limits.commit)
        writing = asyncio.create_task(recorder.run())
        app.state.reads = reads
        app.state.store = Store(reads, recorder)
        app.state.calls = ModelCalls(pool, Ledgers(reads), recorder, limits)
        yield
        recorder.close()
        await writing
        await pool.close()
        await reads.close()
        await database.dispose()

    return Starlette(routes=paths, lifespan=lifespan, exception_handlers={404: unknown, 405: unknown})


async def health(request: Request) -> Response:
    """Harnesses probe the base URL; so do supervisors."""
    return json_response({"status": "ok", "service": "polar-proxy"})
