"""The endpoints of one dialect: keys, bodies, and every failure answered in the dialect's own shape.

What a call does is `calls`' affair; how its answer leaves is `relay`'s; which paths there are, the dialect says.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from polar.dialects.base import BadRequest, Dialect, Route
from polar.errors import AuthError
from polar.nesting import DEEPEST, too_deep
from polar.proxy import metrics
from polar.proxy.calls import ModelCalls
from polar.proxy.flights import Asked
from polar.proxy.limits import Limits
from polar.proxy.relay import Relay, error_response, json_response
from polar.proxy.roles import role_of
from polar.proxy.sessions import Caller, find_caller
from polar.proxy.store import Store
from polar.proxy.wire import wire_error

Endpoint = Callable[[Request], Awaitable[Response]]
SOCKET_REFUSED = "this proxy does not speak WebSocket; send the request by POST, with stream: true for events"


class Door:
    """One dialect's."""

    def __init__(self, dialect: Dialect, limits: Limits, max_body: int) -> None:
        self._dialect = dialect
        self._limits = limits
        self._max_body = max_body

    def endpoint(self, route: Route) -> Endpoint:
        """The handler of a route."""
        kinds: dict[str, Callable[[Request, Route], Awaitable[Response]]] = {
            "generate": self._generate,
            "count": self._count,
            "models": self._models,
            "model": self._models,
            "no_socket": self._no_socket,
            "hello": self._hello,
            "absent": self._absent,
        }
        act = kinds.get(route.kind, self._recorded)

        async def handle(request: Request) -> Response:
            try:
                response = await act(request, route)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            except Exception as error:  # noqa: BLE001 - the app's edge: a harness must be told in its own dialect
                response = error_response(self._dialect, wire_error(error))
            if not isinstance(response, Relay):  # it counts itself, once it knows its status
                metrics.told(self._dialect.name, route.kind, response.status_code)
            return response

        return handle

    async def _generate(self, request: Request, route: Route) -> Response:
        asked = await self._asked(request, route)
        calls: ModelCalls = request.app.state.calls
        flight = calls.flights.board(asked)
        return Relay(calls, flight, self._dialect, self._limits, asked.request)

    async def _count(self, request: Request, route: Route) -> Response:
        calls: ModelCalls = request.app.state.calls
        return json_response(self._dialect.counted(await calls.count(await self._asked(request, route))))

    async def _models(self, request: Request, route: Route) -> Response:
        caller, _ = await self._caller(request)
        calls: ModelCalls = request.app.state.calls
        passport = (await calls.pool.link(caller.lane, caller.engine)).passport
        names = dict.fromkeys(name for name in (caller.model_name, passport.model) if name)
        models = [{"id": name, "context_length": passport.context_length} for name in names]
        return json_response(self._dialect.models(route.kind, models, _params(request, route)))

    async def _recorded(self, request: Request, route: Route) -> Response:
        caller, secret = await self._caller(request)
        store: Store = request.app.state.store
        shown = await store.show(
            self._dialect, caller, secret, route.kind, request.path_params["id"], _params(request, route)
        )
        return json_response(shown)

    async def _hello(self, request: Request, route: Route) -> Response:
        return json_response({"status": "ok"})

    async def _absent(self, request: Request, route: Route) -> Response:
        raise BadRequest(f"there is no {request.method} {shown_path(request)} here", code="not_found", status=404)

    async def _no_socket(self, request: Request, route: Route) -> Response:
        return self._socket_refusal()

    async def refuse_socket(self, socket: WebSocket) -> None:
        """The same where the server itself speaks WebSocket, and hands the handshake over."""
        await socket.send_denial_response(self._socket_refusal())

    def _socket_refusal(self) -> Response:
        """As a server refuses that knows the protocol and will not speak it: clients then fall back at once, where
        they would try again after a 404."""
        body = self._dialect.error(426, "upgrade_required", SOCKET_REFUSED)
        return json_response(body, 426, {"allow": "POST"})

    async def _asked(self, request: Request, route: Route) -> Asked:
        caller, secret = await self._caller(request)
        body, raw = parse_body(await self._read(request))
        params = _params(request, route)
        store: Store = request.app.state.store
        cites = self._dialect.cites(body)
        cited = await store.find(self._dialect, caller, secret, cites) if cites else {}
        whole = self._dialect.whole(body, params, cited)
        if whole is not body:
            # Recorded whole, so that a completion can be read without those before it.
            body, raw = whole, orjson.dumps(whole)
        parsed = self._dialect.parse(body, params)
        if not caller.serves(parsed.model):
            message = f"The model `{parsed.model}` does not exist here; this session serves {caller.model_name}"
            raise BadRequest(message, field="model", code="model_not_found", status=404)
        role = role_of(parsed, request.headers, caller.harness)
        return Asked(self._dialect, parsed, caller, body, raw, secret, role)

    async def _read(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body):
                return await read_body(request, self._max_body)
        except TimeoutError:
            message = f"the body did not come within {self._limits.body:g} s"
            raise BadRequest(message, code="request_timeout", status=408) from None

    async def _caller(self, request: Request) -> tuple[Caller, str]:
        key = request.path_params.get("key") or self._dialect.secret(request.headers, request.query_params)
        if not key:
            raise AuthError("no key was sent: send the session's key as your API key, or as /s/<key> in the base URL")
        caller = await find_caller(request.app.state.reads, key)
        if caller is None:
            raise AuthError("this key belongs to no session that is executing: it is wrong, or the session has ended")
        return caller, key


def shown_path(request: Request) -> str:
    """The path as an error may repeat it: without a key that stands in it."""
    return re.sub(r"^/s/[^/]*", "/s/<key>", request.url.path)


def _params(request: Request, route: Route) -> dict[str, str]:
    return {**request.query_params, **request.path_params, **route.fixed}


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
    if too_deep(body):
        raise BadRequest(f"the body is nested more than {DEEPEST} levels deep", code="invalid_json")
    return body, raw


def _lenient(raw: bytes, strict: orjson.JSONDecodeError) -> Any:
    """JSON with half surrogate pairs in it, as harnesses send that cut a text in the middle of an emoji."""
    try:
        text = json.dumps(json.loads(raw), ensure_ascii=False)
        return orjson.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        raise BadRequest(f"the body is not valid JSON: {strict}", code="invalid_json") from None
