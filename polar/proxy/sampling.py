"""The engine call: tried again while nothing has begun, ended within a second when the harness hangs up.

Knows nothing of sessions, records or dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np

from polar.engines.base import Engine, Generation
from polar.errors import EngineError
from polar.messages import ModelRequest, Sampling
from polar.proxy.ledger import Ids
from polar.proxy.signals import Signal, until_any

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0


class HungUpError(Exception):
    """Nobody waits for this answer any more; `partial` is what was sampled until then."""

    def __init__(self, partial: Generation | None = None) -> None:
        super().__init__("the harness hung up")
        self.partial = partial


async def patiently(action: Callable[[], Awaitable[T]], hangup: asyncio.Event, seconds: float) -> T:
    """Do `action`, again after retryable EngineErrors, until it works, the time is up, or nobody waits."""
    clock = asyncio.get_running_loop().time
    until, pause = clock() + seconds, FIRST_PAUSE
    while True:
        try:
            return await action()
        except EngineError as error:
            if not error.retryable or clock() + pause > until:
                raise
        try:
            async with asyncio.timeout(pause):
                await hangup.wait()
        except TimeoutError:
            pause = min(pause * 2, LONGEST_PAUSE)
        else:
            raise HungUpError


class EngineCall:
    """One sample of one prompt; each try has a request id of its own, so that an abort hits no other."""

    def __init__(
        self,
        engine: Engine,
        prompt: Ids,
        sampling: Sampling,
        *,
        request_id: str,
        hangup: Signal,
        timeout: float,
        abort_grace: float,
        heard: Callable[[list[int]], None] | None,
        recalled: Signal | None = None,
        chat: ModelRequest | None = None,
        size: int | None = None,
    ) -> None:
        """`heard` is told of new ids as they come, where the engine streams them; `recalled` ends the call early;
        `chat` is sent instead of the prompt to an engine that renders by itself; ids from `size` on are no tokens."""
        self._engine = engine
        self._prompt = prompt
        self._sampling = sampling
        self._request_id = request_id
        self._hangup = hangup
        self._timeout = timeout
        self._abort_grace = abort_grace
        self._heard = heard
        self._recalled = recalled or Signal()
        self._chat = chat
        self._size = size
        self.tries = 0

    async def once(self) -> Generation:
        """One try; recalled, it gives what was sampled. Raises EngineError, and HungUpError with what was sampled."""
        request_id = f"{self._request_id}.{self.tries}"
        self.tries += 1
        sample = asyncio.create_task(self._sample(request_id))
        try:
            await until_any(sample, self._hangup, self._recalled, seconds=self._timeout)
            if sample.done():
                return self._checked(sample.result())
            await self._engine.abort(request_id)
            await asyncio.wait({sample}, timeout=self._abort_grace)
            if self._hangup.is_set():
                raise HungUpError(sample.result() if sample.done() and sample.exception() is None else None)
            if not self._recalled.is_set():
                raise EngineError(f"the engine took longer than {self._timeout:g} s", code="engine_timeout", status=504)
            if not sample.done():
                raise EngineError("the engine did not hand over what it had sampled", code="engine_aborted")
            return self._checked(sample.result())
        finally:
            sample.cancel()

    async def _sample(self, request_id: str) -> Generation:
        if self._chat is not None:
            return await self._engine.chat(self._chat, self._sampling, request_id=request_id)
        if self._heard is None or not self._engine.STREAMS_IDS:
            return await self._engine.generate(self._prompt, self._sampling, request_id=request_id)
        async for item in self._engine.stream(self._prompt, self._sampling, request_id=request_id):
            if isinstance(item, Generation):
                return item
            self._known(item)
            self._heard(item)
        raise EngineError("the engine's stream ended without an answer", code="engine_cut")

    def _known(self, ids: list[int]) -> None:
        """Ids that the tokenizer lacks can be neither shown nor trained on."""
        most = np.iinfo(np.int32).max if self._size is None else self._size - 1
        if ids and not (all(type(token) is int for token in ids) and 0 <= min(ids) <= max(ids) <= most):
            wrong = next(token for token in ids if type(token) is not int or not 0 <= token <= most)
            message = f"the engine sampled token {wrong!r}, which its tokenizer does not have: is it that of its model?"
            raise EngineError(message, code="engine_contract")

    def _checked(self, generation: Generation) -> Generation:
        self._known(generation.output_ids)
        if self._chat is not None:
            return generation  # whatever the engine made of the messages is its prompt
        if generation.finish_reason == "abort" and not generation.output_ids:
            return generation  # aborted in the queue, before the prompt was looked at
        seen = generation.prompt_tokens
        same = (
            generation.prompt_ids is None
            or generation.prompt_ids is self._prompt
            or np.array_equal(self._prompt, generation.prompt_ids)
        )
        if not same or (seen is not None and seen != len(self._prompt)):
            message = f"the engine saw another prompt than the {len(self._prompt)} ids it was sent"
            raise EngineError(message, code="engine_altered_prompt")
        return generation
