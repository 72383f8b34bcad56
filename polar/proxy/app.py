"""The proxy as an ASGI application: which paths there are, and what every call of this process shares.

The route tells the dialect; where two have one path, the headers do. What happens at a route is `door`'s affair.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute, compile_path
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Receive, Scope, Send

from polar.dialects import DIALECTS
from polar.dialects.base import Dialect
from polar.proxy import metrics
from polar.proxy.bodies import BodyStore
from polar.proxy.calls import ModelCalls
from polar.proxy.door import Door, Endpoint, shown_path
from polar.proxy.gate import Gate
from polar.proxy.ledgers import Ledgers
from polar.proxy.limits import Limits
from polar.proxy.pool import EnginePool
from polar.proxy.pushes import Pushes
from polar.proxy.reads import Reads
from polar.proxy.recorder import Recorder
from polar.proxy.relay import json_response
from polar.proxy.store import Store
from polar.proxy.watch import Watch
from polar.registry import load
from polar.settings import Settings

KEYED = "/s/"
IN_PATH = f"{KEYED}{{key}}"
"""Before any path of any dialect, for harnesses that cannot set a key."""


def create_app(settings: Settings, limits: Limits | None = None) -> Starlette:
    """Wire everything; nothing is connected before the server's event loop runs."""
    limits = limits or Limits()
    dialects = [load("dialect", DIALECTS, name, Dialect)() for name in sorted(DIALECTS)]  # type: ignore[type-abstract]
    paths: list[BaseRoute] = [Path(path, health, methods=["GET"]) for path in ("/", "/health", IN_PATH)]
    paths.append(Path("/metrics", metrics.Endpoint(settings.auth).show, methods=["GET"]))
    claimed: dict[tuple[str, str], list[tuple[Dialect, Endpoint]]] = {}
    for dialect in dialects:
        door = Door(dialect, limits, settings.max_body_mb * 2**20)
        for route in dialect.routes:
            claimed.setdefault((route.path, route.method), []).append((dialect, door.endpoint(route)))
            if route.kind == "no_socket":
                paths += [WebSocketRoute(prefix + route.path, door.refuse_socket) for prefix in ("", IN_PATH)]
    for (path, method), claimants in claimed.items():
        for prefix in ("", IN_PATH):
            paths.append(Path(prefix + path, shared(claimants), methods=[method]))
    routes = [route for dialect in dialects for route in dialect.routes if route.kind != "absent"]
    known = dict.fromkeys(f"{route.method} {route.path}" for route in routes)

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        message = f"there is no {request.method} {shown_path(request)} here; there are {', '.join(known)}"
        kind = "method_not_allowed" if status == 405 else "not_found"
        return json_response({"error": {"message": message, "type": kind, "param": None, "code": kind}}, status)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        reads = Reads(settings.database_url, limits.commit)
        # No time for company: an agent may end with its last answer, which without its note would be a ghost.
        recorder = Recorder(settings.database_url, limits.commit, 0.0)
        pool = EnginePool()
        gate = Gate()
        watch = Watch(settings.database_url, settings.node_id, gate, limits.beat)
        pushes = Pushes(settings.database_url, settings.node_id, pool, watch.pushed)
        await watch.begin()
        pushes.begin()
        writing = asyncio.create_task(recorder.run())
        app.state.reads = reads
        app.state.store = Store(reads, recorder)
        app.state.calls = ModelCalls(pool, Ledgers(reads), BodyStore(reads, limits.aside_bytes), recorder, gate, limits)
        yield
        await pushes.close()
        await watch.close()
        recorder.close()
        await writing
        await pool.close()
        await reads.close()

    app = Proxy(routes=paths, lifespan=lifespan, exception_handlers={404: unknown, 405: unknown})
    app.doors = {place: shared(claimants) for place, claimants in claimed.items() if "{" not in place[0]}
    named = [route.path for route in routes if route.kind == "generate" and "{" in route.path]
    app.patterns = [(compile_path(path)[0], shared(claimed[path, "POST"])) for path in named]
    return app


class Proxy(Starlette):
    """Opens the door of a model call at once.

    To try one pattern after the other, and to pass through what catches errors that doors have caught already, would
    take a tenth of all that the proxy does for a call."""

    doors: Mapping[tuple[str, str], Endpoint] = {}
    """Those at paths without parameters, by path and method."""
    patterns: Sequence[tuple[re.Pattern[str], Endpoint]] = ()
    """Those of model calls whose path names the model."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = super().__call__
        if scope["type"] == "http":
            path, params = scope["path"], {}
            if path.startswith(KEYED):
                key, slash, rest = path[len(KEYED) :].partition("/")
                path, params = slash + rest, {"key": key}
            door = self.doors.get((path, scope["method"]))
            if door is None and scope["method"] == "POST":
                for pattern, behind in self.patterns:
                    if (found := pattern.match(path)) is not None:
                        door, params = behind, {**params, **found.groupdict()}
                        break
            if door is not None:
                scope["app"], scope["path_params"] = self, params
                app = await door(Request(scope, receive, send))
        await app(scope, receive, send)


def shared(claimants: list[tuple[Dialect, Endpoint]]) -> Endpoint:
    """The endpoint of a path that several dialects may have: whose client it is, the dialects tell by headers."""

    async def choose(request: Request) -> Response:
        willing = (endpoint for dialect, endpoint in claimants if dialect.claims(request.headers))
        return await next(willing, claimants[-1][1])(request)

    return claimants[0][1] if len(claimants) == 1 else choose


async def health(request: Request) -> Response:
    """Harnesses probe the base URL; so do supervisors."""
    return json_response({"status": "ok", "service": "polar-proxy"})
