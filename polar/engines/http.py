"""What every adapter of an HTTP server needs: posting, reading events, hanging up, and one EngineError per way to fail.

Knows no server's paths or field names; those are the members'.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from polar.engines.base import Engine, PromptIds
from polar.errors import EngineError

PROBE = aiohttp.ClientTimeout(total=15)
ABORT = aiohttp.ClientTimeout(total=5)
NOT_BEGUN = frozenset({429, 503})
"""Statuses that say the engine did not take the request up."""
DATA = b"data: "
ECHO = b'"prompt_token_ids":'
OVERFLOW_WORDS = (
    "context length",
    "context size",
    "max_req_input_len",
    "longer than the model",
    "longer than the maximum model length",
    "exceeds the maximum",
    "too long",
)


class AbandonedError(Exception):
    """`abort` closed this request's connection."""


@dataclass(slots=True)
class Live:
    """A request on the wire, and how to hang up on it."""

    opening: asyncio.Future[aiohttp.ClientResponse]
    reply: aiohttp.ClientResponse | None = None
    abandoned: bool = False

    def hang_up(self) -> None:
        """Close the connection, whatever it is waiting for."""
        self.abandoned = True
        if self.reply is not None:
            self.reply.close()
        else:
            self.opening.cancel()


class HTTPEngine(Engine):
    """An engine behind HTTP; `PRODUCT` is how its errors call it."""

    PRODUCT = "stock engine"

    def __init__(self, url: str, http: aiohttp.ClientSession, *, model: str | None = None) -> None:
        super().__init__(url, http, model=model)
        self._live: dict[str, Live] = {}

    async def abort(self, request_id: str) -> None:
        """Close the request's connection: whichever version and flags a server has, that ends its work."""
        live = self._live.get(request_id)
        if live is not None:
            live.hang_up()

    @asynccontextmanager
    async def _post(
        self, path: str, body: dict[str, Any], request_id: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply once its status is good. Raises EngineError, and AbandonedError after `abort`."""
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"content-type": "application/json"}
        live = Live(asyncio.ensure_future(self._send(path, data, headers)))
        if request_id is not None:
            self._live[request_id] = live
        try:
            live.reply = await live.opening
            if live.reply.status != 200:
                raise refused(live.reply.status, await live.reply.text())
            yield live.reply
        except asyncio.CancelledError:
            live.opening.cancel()
            if not live.abandoned:
                raise
            raise AbandonedError from None
        except aiohttp.ClientConnectorError as error:
            raise self._down() from error
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.shown} took too long", code="engine_timeout", status=504) from error
        except aiohttp.ClientError as error:
            if live.abandoned:
                raise AbandonedError from None
            # Closed before a status line: either a stale kept-alive connection or an engine that just died. Nothing
            # was sampled that anyone will see, so trying again cannot double an answer.
            reason = f"the connection to the engine at {self.shown} broke: {error or type(error).__name__}"
            raise EngineError(reason, code="engine_cut", retryable=live.reply is None) from error
        finally:
            if request_id is not None and self._live.get(request_id) is live:
                del self._live[request_id]
            if live.reply is not None:
                # A reply that was read to its end has let its connection go already; of any other, nobody wants more.
                live.reply.close()

    async def _send(self, path: str, data: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        return await self.http.post(self.url + path, data=data, headers=headers)

    async def _ask(
        self, path: str, body: dict[str, Any], request_id: str | None = None, *, sent: bytes | None = None
    ) -> dict[str, Any]:
        """The JSON object that is the whole reply. `sent`: the prompt's ids as JSON; see `unechoed`."""
        async with self._post(path, body, request_id) as reply:
            data = await reply.read()
        return json_object(data if sent is None else unechoed(data, sent))

    async def _reads(self, reply: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
        """The data of server-sent events, those together that came at once; comments and the closing mark are left
        out."""
        buffer = b""
        async for chunk in reply.content.iter_any():
            buffer += chunk.replace(b"\r\n", b"\n")
            *events, buffer = buffer.split(b"\n\n")
            if found := [data for event in events if (data := _data(event)) and data != b"[DONE]"]:
                yield found

    async def _events(
        self, reply: aiohttp.ClientResponse, *, sent: bytes | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events that are JSON objects. `sent`: the prompt's ids as JSON; see `unechoed`."""
        async for found in self._reads(reply):
            for data in found:
                yield json_object(data if sent is None else unechoed(data, sent))

    async def _get(self, *paths: str, needed: bool = True) -> dict[str, Any]:
        """The first of these paths that the server has; nothing if it has none and none is needed."""
        for path in paths:
            try:
                async with self.http.get(self.url + path, timeout=PROBE) as reply:
                    if reply.status == 200:
                        return json_object(await reply.read())
                    if reply.status in NOT_BEGUN:
                        raise EngineError(
                            f"the engine at {self.shown} is not ready", code="engine_down", retryable=True
                        )
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._down() from error
        if not needed:
            return {}
        raise EngineError(
            f"the server at {self.shown} has no {paths[0]}: is it a {self.PRODUCT} server?", code="engine_contract"
        )

    async def _card(self) -> dict[str, Any]:
        """The first model of /v1/models."""
        cards = (await self._get("/v1/models")).get("data")
        return cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}

    def _down(self) -> EngineError:
        return EngineError(f"no engine answers at {self.shown}", code="engine_down", retryable=True)

    def _broken(self, field: str) -> EngineError:
        return EngineError(
            f"the engine's answer lacks a usable {field}; Polar needs {self.PRODUCT}", code="engine_contract"
        )

    def _no_ids(self) -> EngineError:
        """Tokens were sampled and their ids did not come: nothing of such an answer can be trained on, or continued."""
        message = (
            f"the engine at {self.shown} answered without the ids of the tokens it sampled: a router in front of it "
            f"strips them, or it is older than Polar needs ({self.PRODUCT}); set the lane's base_url to the engine "
            "itself, or `mode: canonical` for a lane that is not trained on"
        )
        return EngineError(message, code="no_token_ids")


def prompt_json(ids: PromptIds) -> bytes:
    """Token ids as JSON, to be sent and to be found again in what comes back."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)


def unechoed(data: bytes, sent: bytes) -> bytes:
    """An answer with `true` in the place of the prompt ids that it repeats, if they are those that were sent.

    Comparing the text proves as much as comparing numbers, at a hundredth of what it takes to read 10,000 of them. No
    text of a model is taken for the field: inside a string its quotes would be escaped. Ids that differ, or are
    written otherwise, stay as they are and are read one by one."""
    place = data.find(ECHO)
    while place >= 0:
        ids = place + len(ECHO)
        if data.startswith(sent, ids):
            return b"".join((data[:ids], b"true", data[ids + len(sent) :]))
        place = data.find(ECHO, ids)
    return data


def _data(event: bytes) -> bytes:
    if event.startswith(DATA) and b"\n" not in event:
        return event[len(DATA) :]  # as they nearly all are
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"".join(lines).removeprefix(b"data:").strip()


def refused(status: int, text: str) -> EngineError:
    """The error that a status other than 200 stands for."""
    message = text[:500]
    try:
        body = orjson.loads(text)
        inner = body.get("error", body.get("detail", body))
        message = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (orjson.JSONDecodeError, AttributeError):
        message = text[:500]
    if status == 400 and any(word in message.lower() for word in OVERFLOW_WORDS):
        return EngineError(message, code="context_length_exceeded", status=400)
    code = "engine_refused" if status < 500 else "engine_error"
    return EngineError(
        f"the engine answered {status}: {message}", code=code, status=status, retryable=status in NOT_BEGUN
    )


def json_object(data: bytes) -> dict[str, Any]:
    """A JSON object that is not an error in disguise. Raises EngineError."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineError("the engine's answer is not JSON", code="engine_contract") from error
    if not isinstance(value, dict):
        raise EngineError("the engine's answer is not a JSON object", code="engine_contract")
    if value.get("error") and "meta_info" not in value:
        inner = value["error"]
        message = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
        status = inner.get("code") if isinstance(inner, dict) else None
        raise refused(status if isinstance(status, int) else 500, message)
    return value
