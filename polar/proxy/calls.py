"""One model call, from a parsed request to a recorded answer.

place in the ledger → record the intent → engine → parse → mint ids → record → answer. Each step is somebody
else's; this file is their order. HTTP is `app`'s and `relay`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import orjson

from polar.bodies import pack
from polar.engines.base import Generation
from polar.errors import EngineError, LostLeaseError, SessionError
from polar.log import line
from polar.messages import Answer, Sampling
from polar.models import now
from polar.proxy import rows
from polar.proxy.answering import Shown, read_answer
from polar.proxy.bodies import BodyStore, Stored
from polar.proxy.canonical import counted
from polar.proxy.flights import Asked, Flight, Flights, new_completion_id
from polar.proxy.gate import Gate, Passage
from polar.proxy.ledger import Ids, Ledger, Place, as_ids, make_node
from polar.proxy.ledgers import Ledgers
from polar.proxy.limits import Limits
from polar.proxy.parts import Parts
from polar.proxy.pool import EnginePool
from polar.proxy.prepare import offered, prepare, refuse_overflow, seconds_left, within_budget
from polar.proxy.recorder import Fence, Recorder
from polar.proxy.rows import Prepared
from polar.proxy.sampling import EngineCall, HungUpError, patiently
from polar.proxy.showing import show
from polar.renderers.base import TAIL

logger = logging.getLogger(__name__)
STRAYED = frozenset({"no_match", "edited", "tools_changed"})


def twin(place: Place) -> Place:
    """The place of another sample of the same request."""
    return replace(place, flags=(*place.flags, "sibling"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One of a call's `n` samples on its way into the record."""

    flight: Flight
    ledger: Ledger
    place: Place
    id: str
    started: float
    prepared: Prepared | None = None
    """None: the call got no further than its lane's engine."""


class ModelCalls:
    """All calls of this process."""

    def __init__(
        self, pool: EnginePool, ledgers: Ledgers, bodies: BodyStore, recorder: Recorder, gate: Gate, limits: Limits
    ) -> None:
        self.pool = pool
        self.flights = Flights(self._run)
        self._ledgers = ledgers
        self._bodies = bodies
        self._recorder = recorder
        self._gate = gate
        self._limits = limits

    def delivered(self, flight: Flight) -> None:
        """The client has the whole answer."""
        caller = flight.asked.caller
        for answer in flight.task.result():
            self._ledgers.delivered(caller.id, caller.attempt, answer.id)
            self._recorder.delivered(answer.id)

    async def count(self, asked: Asked) -> int:
        """How many tokens the prompt of this call would have."""
        caller = asked.caller
        ledger = await self._ledgers.open(caller.id, caller.attempt, caller.turns)
        link = await self.pool.link(caller.lane, caller.engine)
        prepared = await prepare(asked, link, ledger, ledger.place(asked.request, caller.history), self._limits)
        return len(prepared.prompt) if prepared.chat is None else counted(prepared.chat, link.renderer)

    async def _run(self, flight: Flight) -> list[Answer]:
        asked, caller, started = flight.asked, flight.asked.caller, time.monotonic()
        self._gate.see(caller.policy)
        flight.closed_before = self._gate.closed_seconds()
        ledger = await self._ledgers.open(caller.id, caller.attempt, caller.turns)
        if asked.request.n == 1 and (recorded := await self._undelivered(ledger, flight)) is not None:
            return [recorded]
        within_budget(caller)
        place = ledger.place(asked.request, caller.history)
        if place.reason in STRAYED:
            # Before a conversation is taken for a new one: its parent may have been answered elsewhere a moment ago.
            await self._ledgers.refresh(ledger, caller.id, caller.attempt)
            place = ledger.place(asked.request, caller.history)
        samples = [Sample(flight, ledger, place, flight.id, started)]
        others = [new_completion_id() for _ in range(asked.request.n - 1)]
        samples += [Sample(flight, ledger, twin(place), each, started) for each in others]
        body = rows.masked(asked.raw, asked.secret)
        stored = await self._bodies.stored(body, (place.parent.id if place.parent else None, ledger.last_body))
        problem: Exception | None = None
        try:
            retry = self._left(flight, self._limits.retry)
            link = await patiently(lambda: self.pool.link(caller.lane, caller.engine), flight.hangup, retry)
            prepared = await prepare(asked, link, ledger, place, self._limits)
            places = [prepared.place, *[twin(prepared.place)] * (len(samples) - 1)]
            samples = [replace(s, prepared=prepared, place=each) for s, each in zip(samples, places, strict=True)]
            flight.prompt_tokens = len(prepared.prompt)
        except (SessionError, HungUpError) as error:
            problem = error
        bodies = [stored]
        if others:
            bodies += [Stored(pack(body, body), flight.id, stored.depth + 1)] * len(others)
        intents = [
            rows.intent(asked, s.id, each, s.place, s.prepared, flight.body_hash)
            for s, each in zip(samples, bodies, strict=True)
        ]
        await self._recorder.intend(intents, rows.media(place, asked.request.messages))
        self._bodies.keep(flight.id, body, stored)
        ledger.last_body = flight.id
        if len(samples) == 1:
            return [await self._sample(samples[0], problem)]
        outcomes = await asyncio.gather(*(self._sample(s, problem) for s in samples), return_exceptions=True)
        answers = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome)
        return answers

    def _left(self, flight: Flight, most: float) -> float:
        """`most`, or what the session has left if that is less: its clock stands still while the gate is closed."""
        return seconds_left(flight.asked.caller, most, self._gate.closed_seconds() - flight.closed_before)

    async def _undelivered(self, ledger: Ledger, flight: Flight) -> Answer | None:
        """The answer to this very body that is recorded and that no client holds."""
        for node in list(ledger.undelivered(flight.body_hash)):
            row = await self._ledgers.recorded(node.id)
            if not row.delivered and (now() - row.finished_at).total_seconds() < self._limits.deliver_grace:
                # Another process may have just sent it, with the note of that still on its way.
                await asyncio.sleep(self._limits.deliver_grace)
                row = await self._ledgers.recorded(node.id)
            node.delivered |= row.delivered
            if not node.delivered:
                return rows.answer_of(row, node.id, flight.asked.request.model, node.prompt_len)
        return None

    async def _sample(self, sample: Sample, problem: Exception | None) -> Answer:
        """Ask the engine, record how it went, and only then return."""
        call = None
        try:
            if problem is not None:
                raise problem
            assert sample.prepared is not None
            refuse_overflow(sample.prepared)
            call = self._parts(sample, sample.prepared)
            generation = await call.whole()
        except HungUpError as gone:
            await self._settle(sample, "aborted", call, gone.partial)
            raise
        except SessionError as error:
            sampled = call.sampled if call else None
            await self._settle(
                sample, "failed", call, sampled, {"error": rows.failure(error, sample.flight.asked.secret)}
            )
            raise
        if generation.finish_reason == "abort":
            reason = f"the engine aborted the call: {generation.detail or 'it did not say why'}"
            aborted = EngineError(reason, code="engine_aborted", status=503)
            await self._settle(
                sample, "aborted", call, generation, {"error": rows.failure(aborted, sample.flight.asked.secret)}
            )
            raise aborted
        return await self._answer(sample, sample.prepared, call, generation)

    def _parts(self, sample: Sample, prepared: Prepared) -> Parts:
        asked, link = sample.flight.asked, prepared.link
        shown: Shown | None = None
        if asked.request.stream and sample.id == sample.flight.id and prepared.chat is None:
            pieces = link.renderer.pieces(offered(asked.request), prepared.prompt[-TAIL:].tolist())
            shown = Shown(pieces, prepared.sampling.stop, sample.id)

        def left(most: float) -> float:
            return self._left(sample.flight, most)

        def make(prompt: Ids, sampling: Sampling, request_id: str, passage: Passage) -> EngineCall:
            def heard(ids: list[int]) -> None:
                assert shown is not None
                passage.heard += len(ids)
                sample.flight.show(shown.feed(ids))

            return EngineCall(
                link.engine,
                prompt,
                sampling,
                request_id=request_id,
                hangup=sample.flight.hangup,
                timeout=left(link.spec.timeout_seconds),
                abort_grace=self._limits.abort_grace,
                heard=None if shown is None else heard,
                recalled=passage.recalled,
                chat=prepared.chat,
                size=link.renderer.size(),
            )

        return Parts(
            self._gate,
            make,
            prepared.prompt,
            prepared.sampling,
            request_id=sample.id,
            streams=shown is not None and link.engine.STREAMS_IDS,
            continues=prepared.chat is None and prepared.sampling.json_schema is None,
            hangup=sample.flight.hangup,
            left=left,
            retry=self._limits.retry,
            decode=link.renderer.decode,
        )

    async def _answer(self, sample: Sample, prepared: Prepared, call: Parts, generation: Generation) -> Answer:
        asked, place = sample.flight.asked, sample.place
        prompt, suffix, learned = prepared.prompt, prepared.suffix, {}
        if prepared.chat is not None:
            prompt = suffix = as_ids(generation.prompt_ids or [])
            learned = {"prompt_len": len(prompt), "suffix_ids": suffix.tobytes()}
        answer, flags = read_answer(generation, asked.request, prepared.link.renderer, sample.id, prompt)
        node = make_node(
            sample.id,
            place,
            answer.message,
            prompt_len=len(prompt),
            suffix_ids=suffix,
            output_ids=as_ids(generation.output_ids),
            body_hash=sample.flight.body_hash,
            trim=prepared.trim,
        )
        body = pack(rows.masked(orjson.dumps(asked.dialect.answer(asked.request, [answer])), asked.secret))
        values = {
            "answer": body,
            "parsed": {
                "ledger": rows.hashes(prepared, place, sample.flight.body_hash, node),
                "message": rows.served(answer.message, asked.secret),
                "told": rows.told(answer, asked.secret),
            },
            "chain_hash": node.chain_hash,
            "flags": [*place.flags, *prepared.flags, *flags, *call.flags],
            **learned,
        }
        if not await self._settle(sample, "answered", call, generation, values, turns=1):
            raise LostLeaseError("this session has ended")
        sample.ledger.add(node)
        return answer

    async def _settle(
        self,
        sample: Sample,
        outcome: str,
        call: Parts | None,
        generation: Generation | None,
        values: dict[str, Any] | None = None,
        *,
        turns: int = 0,
    ) -> bool:
        """Commit the end of a call, and say it in one line of the log."""
        flight, prepared, caller = sample.flight, sample.prepared, sample.flight.asked.caller
        tokens = generation.sampled if generation else 0
        ms = round((time.monotonic() - sample.started) * 1000)
        told = [*(prepared.flags if prepared and generation else ()), *(call.flags if call else ())]
        columns: dict[str, Any] = {
            "outcome": outcome,
            "flags": [*sample.place.flags, *told],
            "engine": rows.engine(prepared, generation, call.tries if call else 0, ms),
            "model_used": prepared.link.passport.model if prepared else None,
            "finished_at": now(),
            **rows.sampled(generation),
            **(values or {}),
        }
        fence = Fence(caller.id, caller.attempt, caller.key_hash)
        counts = await self._recorder.settle(fence, sample.id, columns, turns=turns, tokens=tokens)
        error = columns.get("error") or {}
        shown = outcome if counts or outcome != "answered" else "refused"
        prompt = columns.get("prompt_len", len(prepared.prompt) if prepared else 0)
        show(
            flight.asked,
            sample.id,
            sample.place,
            prepared,
            call,
            generation,
            shown,
            prompt=prompt,
            started=sample.started,
            error=error.get("code") or (shown if shown != "answered" else None),
        )
        if logger.isEnabledFor(logging.INFO):
            said = {"place": sample.place.reason, "sampled": tokens, "ms": ms, "error": error.get("code")}
            size = len(prepared.prompt) if prepared else None
            who = {"task": caller.task, "session": caller.id, "lane": caller.lane}
            logger.info(line(f"call {shown}", **who, completion=sample.id, prompt=size, **said))
        return counts
