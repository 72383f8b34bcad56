"""Calls under way, apart from the connections that asked for them.

A harness that repeats a call joins the one in the air; only when the last one waiting hangs up is the engine's
work aborted. What a call does is `calls`' affair, what its client sees is `relay`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from polar.dialects.base import Dialect
from polar.messages import Answer, ModelRequest, ToolCall
from polar.proxy.roles import MAIN, Role
from polar.proxy.sessions import Caller
from polar.proxy.signals import Signal

Piece = tuple[Literal["reasoning", "text"], str] | ToolCall
"""What of an answer may be shown before it is whole; a tool call as soon as it is, with its id."""


def new_completion_id() -> str:
    """96 random bits: short enough for the tool-call ids made of it, which providers cap at 40 characters."""
    return f"cmp-{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a harness asked, and on whose behalf."""

    dialect: Dialect
    request: ModelRequest
    caller: Caller
    body: dict[str, Any]
    raw: bytes
    secret: str
    """Never stored: masked in whatever is."""
    role: Role = MAIN

    def body_hash(self) -> bytes:
        """Names the call: a harness that sends the same again, streaming or not, repeats it."""
        asked = {key: value for key, value in self.body.items() if key not in ("stream", "stream_options")}
        return hashlib.blake2b(
            # Sorted, because some clients write the same body with its keys in another order each time.
            orjson.dumps([self.dialect.name, self.request.model, asked], option=orjson.OPT_SORT_KEYS),
            digest_size=16,
        ).digest()


@dataclass(eq=False, slots=True)
class Flight:
    """One call, with those who wait for it."""

    asked: Asked
    body_hash: bytes
    id: str = field(default_factory=new_completion_id)
    pieces: list[Piece] = field(default_factory=list)
    """What may be shown already, in order."""
    prompt_tokens: int | None = None
    """Known once the prompt is made."""
    closed_before: float = 0.0
    """Seconds for which the gate had been closed when the call came."""
    hangup: Signal = field(default_factory=Signal)
    task: asyncio.Task[list[Answer]] = field(init=False)
    _waiting: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        """One waits less; with the last, the call is aborted."""
        self._waiting -= 1
        if self._waiting <= 0 and not self.task.done():
            self.hangup.set()

    def join(self) -> None:
        """One waits more."""
        self._waiting += 1

    def show(self, pieces: Sequence[Piece]) -> None:
        """Let those who stream have these."""
        if pieces:
            self.pieces += pieces
            self.wake()

    def wake(self) -> None:
        """Something is new: pieces, the end, or a client that left."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, shown: int, seconds: float) -> bool:
        """Wait until there is more than `shown` pieces, or the end; False if the time went by in silence."""
        if len(self.pieces) > shown or self.task.done():
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True


class Flights:
    """Those of this process, by what was asked."""

    def __init__(self, fly: Callable[[Flight], Coroutine[Any, Any, list[Answer]]]) -> None:
        self._fly = fly
        self._flying: dict[tuple[str, int, bytes], Flight] = {}

    def board(self, asked: Asked) -> Flight:
        """The flight of this call, joined: the one under way if it is a repeat, else a new one."""
        key = (asked.caller.id, asked.caller.attempt, asked.body_hash())
        flight = self._flying.get(key)
        if flight is None or flight.hangup.is_set():
            flight = self._flying[key] = Flight(asked, key[2])
            flight.task = asyncio.create_task(self._fly(flight))
            flight.task.add_done_callback(lambda _: self._land(key, flight))
        flight.join()
        return flight

    def _land(self, key: tuple[str, int, bytes], flight: Flight) -> None:
        if self._flying.get(key) is flight:
            del self._flying[key]
        if not flight.task.cancelled():
            flight.task.exception()  # whoever waited reads it; with nobody left, the record has it
        flight.wake()
