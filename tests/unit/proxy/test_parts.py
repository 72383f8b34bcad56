"""One answer in several parts: joined as if it had been one, and loud where it cannot be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import pytest

from polar.engines.base import Engine, Generation, Passport, PromptIds
from polar.errors import BudgetError, EngineError
from polar.messages import Sampling
from polar.policy import GateMode
from polar.proxy.gate import Gate, Passage, PolicyNow
from polar.proxy.ledger import Ids, as_ids
from polar.proxy.parts import Parts, joined, stamped, straddling
from polar.proxy.sampling import EngineCall, HungUpError
from polar.proxy.signals import Signal

T = TypeVar("T")
PROMPT = [100, 101]


class Counting(Engine):
    """Samples 1, 2, 3, … after the prompt, one every few milliseconds; an abort gives what there is, or is lost."""

    name = "counting"
    STREAMS_IDS = True

    def __init__(self, last: int, http: aiohttp.ClientSession | None = None) -> None:
        self.last = last
        self.loses = False
        self.forgets = False
        self.away = 0
        self.asked: list[tuple[list[int], Sampling]] = []
        self.made = 0
        self._aborts: dict[str, asyncio.Event] = {}

    async def passport(self) -> Passport:
        raise NotImplementedError

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        async for item in self.stream(prompt_ids, sampling, request_id=request_id):
            if isinstance(item, Generation):
                return item
        raise AssertionError("no end")

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        if self.away:
            self.away -= 1
            raise EngineError("away", code="engine_down", retryable=True)
        given = [int(token) for token in prompt_ids]
        self.asked.append((given, sampling))
        abort = self._aborts[request_id] = asyncio.Event()
        ids: list[int] = []
        reason: Any = "stop"
        for token in range(len(given) - len(PROMPT) + 1, self.last + 1):
            await asyncio.sleep(0.005)
            if abort.is_set():
                reason = "abort"
                break
            if len(ids) == sampling.max_tokens:
                reason = "length"
                break
            ids.append(token)
            self.made += 1
            yield [token]
        if reason == "abort" and self.loses:
            raise EngineError("gone", code="engine_cut")
        if reason == "abort" and self.forgets:
            ids = []
        yield Generation(ids, [-float(token) for token in ids], reason, prompt_tokens=len(given))

    async def abort(self, request_id: str) -> None:
        self._aborts[request_id].set()

    async def score(self, ids: list[int]) -> list[float | None]:
        raise NotImplementedError


class Rig:
    """An engine behind a gate."""

    def __init__(self, last: int = 20) -> None:
        self.engine = Counting(last)
        self.gate = Gate()
        self.hangup = Signal()
        self.heard: list[int] = []
        self._epoch = 0
        self.turn(GateMode.OPEN, 1)

    def turn(self, gate: str, version: int | None) -> None:
        self._epoch += 1
        self.gate.see(PolicyNow(version, gate, self._epoch))

    def parts(self, sampling: Sampling | None = None, *, streams: bool = True, **options: Any) -> Parts:
        def make(prompt: Ids, chosen: Sampling, request_id: str, passage: Passage) -> EngineCall:
            def heard(ids: list[int]) -> None:
                passage.heard += len(ids)
                self.heard += ids

            return EngineCall(
                self.engine,
                prompt,
                chosen,
                request_id=request_id,
                hangup=self.hangup,
                timeout=5,
                abort_grace=0.3,
                heard=heard if streams else None,
                recalled=passage.recalled,
            )

        settings: dict[str, Any] = {
            "request_id": "r",
            "streams": streams,
            "continues": True,
            "hangup": self.hangup,
            "left": lambda most: min(most, 5.0),
            "retry": 1.0,
            "decode": lambda ids: "".join(chr(ord("a") + token - 1) for token in ids),
        }
        return Parts(self.gate, make, as_ids(PROMPT), sampling or Sampling(), **{**settings, **options})

    async def cut_after(self, tokens: int) -> None:
        """Close the gate in mode abort once so many tokens are made, and wait until nothing is at the engine."""
        while self.engine.made < tokens:
            await asyncio.sleep(0.001)
        self.turn(GateMode.ABORT, 1)
        while self.gate.report().in_flight:
            await asyncio.sleep(0.001)


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Do `work` on a loop of its own."""

    async def main() -> T:
        return await work()

    return asyncio.run(main())


@pytest.mark.parametrize("streams", [True, False])
def test_a_cut_answer_goes_on_from_what_was_sampled(streams: bool) -> None:
    """Ids and log-probabilities are joined, each part has its own version, and limits hold for the whole."""

    async def work() -> None:
        rig = Rig()
        parts = rig.parts(Sampling(max_tokens=12, seed=5), streams=streams)
        whole = asyncio.create_task(parts.whole())
        await rig.cut_after(4)
        assert parts.sampled is not None
        first = len(parts.sampled.output_ids)
        await asyncio.sleep(0.05)
        assert rig.gate.report().held == 1
        rig.turn(GateMode.OPEN, 2)
        answer = await whole
        assert answer.output_ids == list(range(1, 13))
        assert answer.logprobs == [-float(token) for token in range(1, 13)]
        assert answer.finish_reason == "length"
        assert answer.prompt_tokens == len(PROMPT)
        assert answer.policy_versions == [
            {"version": 1, "start": 0, "end": first},
            {"version": 2, "start": first, "end": 12},
        ]
        assert (parts.flags, answer.timings["parts"], parts.tries) == (("continued",), [first, 12 - first], 2)
        (_, before), (prompt, after) = rig.engine.asked
        assert prompt == [*PROMPT, *range(1, first + 1)]
        assert (before.max_tokens, before.seed) == (12, 5)
        assert (after.max_tokens, after.seed) == (12 - first, 5 + first)
        if streams:
            assert rig.heard == answer.output_ids

    run(work)


def test_an_engine_that_is_away_after_resume_is_waited_for() -> None:
    """It may be starting with its new weights; what was sampled before is not taken for the whole answer."""

    async def work() -> None:
        rig = Rig()
        parts = rig.parts()
        whole = asyncio.create_task(parts.whole())
        await rig.cut_after(4)
        rig.engine.away = 1
        rig.turn(GateMode.OPEN, 2)
        while rig.engine.away:
            await asyncio.sleep(0.001)
        # Closed again before the second try: that one waits at the gate, too.
        rig.turn(GateMode.DRAIN, 2)
        await asyncio.sleep(0.4)
        assert (rig.gate.report().held, whole.done()) == (1, False)
        rig.turn(GateMode.OPEN, 2)
        assert (await whole).output_ids == list(range(1, 21))
        assert parts.tries == 3

    run(work)


def test_an_answer_that_was_not_cut_is_the_engines() -> None:
    """No flag, no joining, and the version of the policy on all of it."""

    async def work() -> None:
        rig = Rig(3)
        parts = rig.parts()
        answer = await parts.whole()
        assert (answer.output_ids, parts.flags, parts.tries) == ([1, 2, 3], (), 1)
        assert answer.policy_versions == [{"version": 1, "start": 0, "end": 3}]
        assert "parts" not in answer.timings

    run(work)


def test_drain_leaves_a_call_alone() -> None:
    """It ends by itself, and is counted as drained."""

    async def work() -> None:
        rig = Rig()
        whole = asyncio.create_task(rig.parts().whole())
        while rig.engine.made < 3:
            await asyncio.sleep(0.001)
        rig.turn(GateMode.DRAIN, 1)
        assert (await whole).output_ids == list(range(1, 21))
        assert (rig.gate.report().drained, rig.gate.report().aborted) == (1, 0)

    run(work)


def test_a_stop_string_over_the_join_ends_the_answer() -> None:
    """No part's engine could see it: the answer ends with the token that completes it."""

    async def work() -> None:
        rig = Rig()
        parts = rig.parts(Sampling(stop=("bcdefgh",)))
        whole = asyncio.create_task(parts.whole())
        await rig.cut_after(4)
        rig.turn(GateMode.OPEN, 2)
        answer = await whole
        assert answer.output_ids == list(range(1, 9))
        assert answer.logprobs is not None and len(answer.logprobs) == 8
        assert (answer.finish_reason, answer.matched_stop) == ("stop", "bcdefgh")
        assert answer.policy_versions[-1]["end"] == 8

    run(work)


def test_a_stop_string_within_a_part_is_the_engines() -> None:
    """Only what began before the join is looked for, and the earliest end counts."""
    spell: Callable[[list[int]], str] = lambda ids: "".join(chr(96 + token) for token in ids)  # noqa: E731
    assert straddling([1, 2], [3, 4, 5, 6, 7], ("cd", "bc"), spell) == (1, "bc")
    assert straddling([1, 2], [5, 6, 7], ("cd", "bc"), spell) is None


def test_a_hang_up_at_the_gate_keeps_what_there_is() -> None:
    """The wait ends at once, and the partial is handed over for the record."""

    async def work() -> None:
        rig = Rig()
        whole = asyncio.create_task(rig.parts().whole())
        await rig.cut_after(4)
        rig.hangup.set()
        with pytest.raises(HungUpError) as caught:
            await asyncio.wait_for(whole, 1)
        assert caught.value.partial is not None
        assert caught.value.partial.output_ids[:4] == [1, 2, 3, 4]

    run(work)


def test_the_sessions_time_counts_at_the_gate() -> None:
    """A session whose deadline comes while it is held is told so."""

    async def work() -> None:
        rig = Rig()
        rig.turn(GateMode.DRAIN, 1)
        end = time.monotonic() + 0.05
        with pytest.raises(BudgetError, match="paused"):
            await rig.parts(left=lambda most: min(most, max(0.0, end - time.monotonic()))).whole()
        assert rig.engine.asked == []

    run(work)


@pytest.mark.parametrize("reason", ["lost", "forgotten", "schema"])
@pytest.mark.parametrize("streams", [True, False])
def test_what_cannot_go_on_begins_again_or_fails(reason: str, streams: bool) -> None:
    """A partial that is lost or cannot be continued is sampled anew, but never after a harness saw some of it."""

    async def work() -> None:
        rig = Rig()
        rig.engine.loses, rig.engine.forgets = reason == "lost", reason == "forgotten"
        parts = rig.parts(streams=streams, continues=reason != "schema")
        whole = asyncio.create_task(parts.whole())
        await rig.cut_after(4)
        rig.turn(GateMode.OPEN, 2)
        if streams:
            with pytest.raises(EngineError) as caught:
                await whole
            assert (caught.value.code, caught.value.status) == ("engine_aborted", 503)
            return
        answer = await whole
        assert answer.output_ids == list(range(1, 21))
        assert answer.policy_versions == [{"version": 2, "start": 0, "end": 20}]
        assert parts.flags == ()

    run(work)


def test_an_abort_of_the_engines_own_is_not_gone_on_with() -> None:
    """While the gate is open an aborted answer is the caller's to report; while it is closed, the trainer's doing."""

    async def work() -> None:
        for gate, expected in ((GateMode.OPEN, "abort"), (GateMode.DRAIN, "stop")):
            rig = Rig()
            whole = asyncio.create_task(rig.parts().whole())
            while rig.engine.made < 3:
                await asyncio.sleep(0.001)
            if gate is GateMode.DRAIN:
                rig.turn(gate, 1)
            for request_id in list(rig.engine._aborts):
                await rig.engine.abort(request_id)
            await asyncio.sleep(0.02)
            rig.turn(GateMode.OPEN, 1)
            assert (await whole).finish_reason == expected

    run(work)


@pytest.mark.parametrize(
    ("reported", "seen", "spans", "known"),
    [
        ([], [(0, 7)], [(7, 0, 5)], True),
        ([], [(0, None)], [], True),
        ([("default", 0, 5)], [(0, None)], [("default", 0, 5)], True),
        ([("default", 0, 5)], [(0, 7)], [(7, 0, 5)], True),
        ([("3", 0, 2), ("4", 2, 5)], [(0, 7)], [("3", 0, 2), ("4", 2, 5)], True),
        ([], [(0, 7), (2, 8)], [(7, 0, 2), (8, 2, 5)], True),
        ([], [(0, 7), (0, 8)], [(8, 0, 5)], True),
        ([], [(0, 7), (None, 8)], [], False),
        ([], [(0, None), (2, 8)], [(8, 2, 5)], False),
        ([("3", 0, 5)], [(0, 7), (None, 8)], [("3", 0, 5)], True),
    ],
)
def test_who_knows_the_version(reported: Any, seen: Any, spans: Any, known: bool) -> None:
    """The engine's own versions win, SGLang's word for none is none, and what is not known is not made up."""

    def long(short: Any) -> list[dict[str, Any]]:
        return [{"version": version, "start": start, "end": end} for version, start, end in short]

    assert stamped(long(reported), seen, 5) == (long(spans), known)


def test_log_probabilities_of_a_whole_are_all_or_none() -> None:
    """A part without them leaves the whole without, rather than with some at the wrong places."""
    parts = [Generation([1], [-1.0], "abort"), Generation([2], None, "stop")]
    assert joined(parts).logprobs is None
    assert joined(parts[:1]) is parts[0]
