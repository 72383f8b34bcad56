"""The proxy as an ASGI application: routes of every dialect, keys, bodies, and errors in the dialect's shape.

The route tells the dialect. What a call does is `calls`' affair; how its answer leaves is `relay`'s.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path

from polar.db import connect_async
from polar.dialects import DIALECTS
from polar.dialects.base import BadRequest, Dialect, Route
from polar.errors import AuthError
from polar.proxy.calls import ModelCalls
from polar.proxy.flights import Asked
from polar.proxy.ledgers import Ledgers
from polar.proxy.limits import Limits
from polar.proxy.pool import EnginePool
from polar.proxy.reads import Reads
from polar.proxy.recorder import Recorder
from polar.proxy.relay import Relay, error_response, json_response
from polar.proxy.sessions import Caller, find_caller
from polar.proxy.wire import wire_error
from polar.registry import load
from polar.settings import Settings

Endpoint = Callable[[Request], Awaitable[Response]]
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


class Door:
    """The endpoints of one dialect."""

    def __init__(self, dialect: Dialect, limits: Limits, max_body: int) -> None:
        self._dialect = dialect
        self._limits = limits
        self._max_body = max_body

    def endpoint(self, route: Route) -> Endpoint:
        """The handler of a route, whose every failure is answered in the dialect's shape."""

        async def handle(request: Request) -> Response:
            try:
                return await (self._generate(request) if route.kind == "generate" else self._auxiliary(request, route))
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            except Exception as error:  # noqa: BLE001 - the app's edge: a harness must be told in its own dialect
                return error_response(self._dialect, wire_error(error))

        return handle

    async def _generate(self, request: Request) -> Response:
        caller, secret = await self._caller(request)
        raw = await read_body(request, self._max_body)
        body, raw = parse_body(raw)
        asked = Asked(self._dialect, self._dialect.parse(body, request.path_params), caller, body, raw, secret)
        calls: ModelCalls = request.app.state.calls
        flight = calls.flights.board(asked)
        return Relay(calls, flight, self._dialect, self._limits, stream=asked.request.stream)

    async def _auxiliary(self, request: Request, route: Route) -> Response:
        caller, _ = await self._caller(request)
        calls: ModelCalls = request.app.state.calls
        passport = (await calls.pool.link(caller.lane, caller.engine)).passport
        names = dict.fromkeys(name for name in (caller.model_name, passport.model) if name)
        models = [{"id": name, "context_length": passport.context_length} for name in names]
        return json_response(self._dialect.auxiliary(route.kind, models, request.path_params))

    async def _caller(self, request: Request) -> tuple[Caller, str]:
        key = request.path_params.get("key") or self._dialect.secret(request.headers, request.query_params)
        if not key:
            raise AuthError("no key was sent: send the session's key as your API key, or as /s/<key> in the base URL")
        caller = await find_caller(request.app.state.reads, key)
        if caller is None:
            raise AuthError("this key belongs to no session that is executing: it is wrong, or the session has ended")
        return caller, key


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BadRequest (413) as soon as it is known to be too large."""
    message = f"the body is larger than the {limit // 2**20} MiB that this proxy takes (POLAR_MAX_BODY_MB)"
    too_large = BadRequest(message, code="request_too_large", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


def parse_body(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """A JSON object, and a text of it that any reader takes. Raises BadRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        body = _lenient(raw, error)
        raw = orjson.dumps(body)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return body, raw


def _lenient(raw: bytes, strict: orjson.JSONDecodeError) -> Any:
    """JSON with half surrogate pairs in it, as harnesses send that cut a text in the middle of an emoji."""
    try:
        text = json.dumps(json.loads(raw), ensure_ascii=False)
        return orjson.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        raise BadRequest(f"the body is not valid JSON: {strict}", code="invalid_json") from None
