"""From calls to httpx and back, for both clients."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import orjson

from polar.client import calls
from polar.client.calls import SLACK_SECONDS, Call
from polar.client.errors import ApiError, ClientError, ProtocolError, UnreachableError, error_of
from polar.client.feed import Reader
from polar.client.retry import Attempts

T = TypeVar("T")
IDLE_SECONDS = 2.0
"""Servers close idle connections; a shorter life here spares a failed attempt."""


def options(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    """Of an httpx client, synchronous or not."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(keepalive_expiry=IDLE_SECONDS)
    return {"base_url": url, "headers": headers, "timeout": timeout, "limits": limits}


def request_of(http: httpx.Client | httpx.AsyncClient, call: Call[Any], timeout: float) -> httpx.Request:
    """The request of a call; one that makes the server wait may take that much longer."""
    headers = dict(call.headers)
    content = None
    if call.body is not None:
        content = orjson.dumps(call.body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers["Content-Type"] = "application/json"
    longest = httpx.Timeout(timeout, read=max(timeout, call.wait + SLACK_SECONDS))
    return http.build_request(
        call.method, call.path, params=dict(call.params), content=content, headers=headers, timeout=longest
    )


def page_call(reader: Reader) -> Call[Any]:
    """The next page of the feed, as lines."""
    return Call("GET", "/rollout/results", dict, reader.params(), headers={"Accept": calls.LINES}, wait=reader.wait)


def table_call(reader: Reader) -> Call[Any]:
    """The next page of the feed, as Arrow."""
    return Call("GET", "/rollout/results", dict, reader.params(), headers={"Accept": calls.ARROW}, wait=reader.wait)


def read(call: Call[T], response: httpx.Response) -> T:
    """What an answer says. Raises ProtocolError."""
    try:
        return call.read(orjson.loads(response.content))
    except (ValueError, KeyError, TypeError) as error:
        said = response.text[:120]
        asked = f"{call.method} {call.path}"
        raise ProtocolError(f"{response.url.host} does not answer {asked} as Polar does: {said!r}") from error


def verdict(attempts: Attempts, failure: Exception, now: float, url: str) -> float:
    """Seconds to wait before the next attempt. Raises what there is to tell if there is to be none."""
    if isinstance(failure, ApiError):
        pause = attempts.pause(now, failure.status, failure.retry_after)
    else:
        pause = attempts.pause(now, None)
    if pause is not None:
        return pause
    if isinstance(failure, ClientError):
        raise failure
    reason = str(failure) or type(failure).__name__
    raise UnreachableError(f"Polar does not answer at {url} ({reason}); is it up there, and is the port right?") from (
        failure
    )


def checked(response: httpx.Response) -> httpx.Response:
    """A good answer. Raises ApiError; the body must have been read."""
    if not response.is_success:
        raise error_of(response)
    return response
