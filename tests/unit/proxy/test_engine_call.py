"""The engine call: what is tried again, what is not, and how it ends when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import pytest

from polar.engines.base import Engine, Generation, Passport, PromptIds
from polar.errors import EngineError
from polar.messages import Sampling
from polar.proxy.ledger import as_ids
from polar.proxy.sampling import EngineCall, HungUpError, patiently
from polar.proxy.signals import Signal

T = TypeVar("T")
DOWN = EngineError("away", code="engine_down", retryable=True)


class FakeEngine(Engine):
    """Plays a list of outcomes; `None` is an answer that comes only when it is aborted."""

    name = "fake"
    STREAMS_IDS = True

    def __init__(self, *outcomes: Exception | Generation | None, http: aiohttp.ClientSession | None = None) -> None:
        self.outcomes = list(outcomes)
        self.aborted: list[str] = []
        self.abort_heard = asyncio.Event()

    async def passport(self) -> Passport:
        raise NotImplementedError

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        outcome = self.outcomes.pop(0)
        if outcome is None:
            await self.abort_heard.wait()
            return Generation([1], [-1.0], "abort")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        yield [1]
        yield await self.generate(prompt_ids, sampling, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.abort_heard.set()

    async def score(self, ids: list[int]) -> list[float | None]:
        raise NotImplementedError


def call(engine: FakeEngine, **options: Any) -> EngineCall:
    """A call with a short timeout."""
    settings = {"request_id": "r", "hangup": Signal(), "timeout": 5.0, "abort_grace": 0.2, "heard": None}
    return EngineCall(engine, as_ids([1, 2, 3]), Sampling(), **{**settings, **options})


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Do `work` on a loop of its own."""

    async def main() -> T:
        return await work()

    return asyncio.run(main())


ANSWER = Generation([5], [-1.0], "stop", prompt_tokens=3)


def test_retryable_errors_are_tried_again() -> None:
    """An engine that comes back in time costs the harness nothing; each try has a name of its own."""

    async def work() -> None:
        sampling = call(FakeEngine(DOWN, ANSWER))
        assert await patiently(sampling.once, asyncio.Event(), 5) is ANSWER
        assert sampling.tries == 2

    run(work)


@pytest.mark.parametrize(("error", "seconds"), [(DOWN, 0.1), (EngineError("broken"), 5)])
def test_errors_that_stay(error: EngineError, seconds: float) -> None:
    """When the time is up, or the engine may have begun, the error is the answer."""

    async def work() -> None:
        engine = FakeEngine(error, ANSWER)
        with pytest.raises(EngineError):
            await patiently(call(engine).once, asyncio.Event(), seconds)
        assert engine.outcomes == [ANSWER]

    run(work)


def test_hang_up_while_waiting_for_the_engine() -> None:
    """Nobody waits for an engine on behalf of a harness that left."""

    async def work() -> None:
        hangup = Signal()
        asyncio.get_running_loop().call_later(0.1, hangup.set)
        with pytest.raises(HungUpError):
            await asyncio.wait_for(patiently(call(FakeEngine(*[DOWN] * 50)).once, hangup, 60), 2)

    run(work)


@pytest.mark.parametrize("heard", [None, lambda ids: None])
def test_hang_up_aborts(heard: Callable[[list[int]], None] | None) -> None:
    """A hang-up aborts this very try and brings back what was sampled."""

    async def work() -> None:
        engine, hangup = FakeEngine(None), Signal()
        asyncio.get_running_loop().call_later(0.05, hangup.set)
        with pytest.raises(HungUpError) as caught:
            await call(engine, hangup=hangup, heard=heard).once()
        assert engine.aborted == ["r.0"]
        assert caught.value.partial is not None
        assert caught.value.partial.output_ids == [1]

    run(work)


def test_timeout_aborts() -> None:
    """An engine that takes too long is stopped, and the harness told."""

    async def work() -> None:
        engine = FakeEngine(None)
        with pytest.raises(EngineError, match="longer than") as caught:
            await call(engine, timeout=0.05).once()
        assert (caught.value.code, engine.aborted) == ("engine_timeout", ["r.0"])

    run(work)


@pytest.mark.parametrize(
    "changed", [Generation([5], [-1.0], "stop", prompt_tokens=4), Generation([5], [-1.0], "stop", prompt_ids=[1, 2, 4])]
)
def test_another_prompt(changed: Generation) -> None:
    """An engine that saw other ids than it was sent has broken the first promise."""

    async def work() -> None:
        with pytest.raises(EngineError) as caught:
            await call(FakeEngine(changed)).once()
        assert caught.value.code == "engine_altered_prompt"

    run(work)
