"""One answer, sampled in as many parts as the gate makes of it: held, cut, and gone on with from what was sampled.

Whoever asked sees one generation. The engine call is `sampling`'s, opening and closing the gate's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from polar.engines.base import Generation
from polar.errors import BudgetError, EngineError
from polar.messages import Sampling
from polar.policy import Version
from polar.proxy.gate import Gate, Passage, ShutError
from polar.proxy.ledger import Ids, as_ids
from polar.proxy.sampling import EngineCall, HungUpError, patiently
from polar.proxy.signals import Signal
from polar.staleness import UNNAMED

AS_LONG_AS_IT_TAKES = 30 * 86400.0
LOOK = 1.0
"""Seconds after which a held call looks at its session's clock again, at the earliest."""
Span = dict[str, Any]
MakeCall = Callable[[Ids, Sampling, str, Passage], EngineCall]
"""A call for this prompt under this request id, which tells the passage what it hears and heeds its recall."""


class Parts:
    """One sample of one prompt."""

    def __init__(
        self,
        gate: Gate,
        make: MakeCall,
        prompt: Ids,
        sampling: Sampling,
        *,
        request_id: str,
        streams: bool,
        continues: bool,
        hangup: Signal,
        left: Callable[[float], float],
        retry: float,
        decode: Callable[[list[int]], str],
    ) -> None:
        """`streams`: tokens are heard as they come. `continues`: the engine can go on from the middle of an answer; it
        cannot where it takes no ids, or holds an answer to a schema from the answer's beginning. `left` gives at most
        the seconds that the session has."""
        self._gate = gate
        self._make = make
        self._prompt = prompt
        self._sampling = sampling
        self._request_id = request_id
        self._streams = streams
        self._continues = continues
        self._hangup = hangup
        self._left = left
        self._retry = retry
        self._decode = decode
        self._parts: list[Generation] = []
        self._ended = False
        """Whether the last part came to its end; else the gate cut it."""
        self.tries = 0
        self.engine_seconds = 0.0
        """At the engine, all parts together."""
        self.seconds = 0.0
        """In `whole`: the same, with the waits for the gate and between tries."""
        self.flags: tuple[str, ...] = ()
        """What the completion should say of how it came about."""

    @property
    def sampled(self) -> Generation | None:
        """What there is so far; for an answer that did not come to its end."""
        return joined(self._parts) if self._parts else None

    async def whole(self) -> Generation:
        """The answer. Raises EngineError, BudgetError, and HungUpError with what was sampled."""
        began = time.monotonic()
        try:
            while not self._over():
                if not await self._gate.opened(self._hangup, max(LOOK, self._left(AS_LONG_AS_IT_TAKES))):
                    if self._hangup.is_set():
                        raise HungUpError
                    if self._left(AS_LONG_AS_IT_TAKES) > 0:
                        continue  # the session's clock stands still meanwhile
                    raise BudgetError("the session's time ran out while generation was paused", code="session_timeout")
                with suppress(ShutError):
                    await patiently(self._once, self._hangup, self._left(self._retry))
        except HungUpError as gone:
            if gone.partial is not None and (gone.partial.output_ids or not self._parts):
                self._keep(gone.partial)
            raise HungUpError(self.sampled) from None
        finally:
            self.seconds = time.monotonic() - began
        return joined(self._parts)

    async def _once(self) -> None:
        """One try at the next part. Raises ShutError if the gate closed before it."""
        with self._gate.passage(streams=self._streams) as passage:
            ids = [token for part in self._parts for token in part.output_ids]
            prompt = np.concatenate([self._prompt, as_ids(ids)]) if ids else self._prompt
            call = self._make(prompt, self._rest(len(ids)), f"{self._request_id}.{self.tries}", passage)
            self.tries += 1
            began = time.monotonic()
            try:
                part = await call.once()
            except EngineError as error:
                passage.cut = passage.recalled.is_set()
                if not passage.cut:
                    raise
                self._again(passage, error)
                return
            except HungUpError as gone:
                if gone.partial is not None:
                    gone.partial = self._stamped(gone.partial, passage)
                raise
            finally:
                self.engine_seconds += time.monotonic() - began
            closing = passage.recalled.is_set() or not self._gate.policy.open
            passage.cut = closing and part.finish_reason == "abort"
            if passage.cut and (not self._continues or passage.heard > len(part.output_ids)):
                self._again(passage, EngineError("this answer was cut and cannot be gone on with"))
            elif part.output_ids or not passage.cut:
                self._ended = not passage.cut
                self._keep(self._stamped(part, passage))

    def _again(self, passage: Passage, error: EngineError) -> None:
        """What was sampled is lost: sample anew, unless the harness has seen some of it."""
        if passage.heard:
            raise EngineError(error.message, code="engine_aborted", status=503) from error

    def _keep(self, part: Generation) -> None:
        self._parts.append(part)
        if len(self._parts) > 1:
            self.flags = tuple(dict.fromkeys((*self.flags, "continued")))

    def _rest(self, sampled: int) -> Sampling:
        """How to go on after this many tokens."""
        chosen = self._sampling
        if sampled and chosen.max_tokens is not None:
            chosen = replace(chosen, max_tokens=chosen.max_tokens - sampled)
        if sampled and chosen.seed is not None:
            # The same seed would draw the same numbers again.
            chosen = replace(chosen, seed=chosen.seed + sampled)
        return chosen

    def _over(self) -> bool:
        """Whether the last part ends the answer; makes it say so where its engine could not."""
        if not self._parts:
            return False
        last, most = self._parts[-1], self._sampling.max_tokens
        if len(self._parts) > 1 and self._sampling.stop and (found := self._straddling()) is not None:
            self._parts[-1], self._ended = shortened(last, *found), True
        elif not self._ended and most is not None and sum(len(part.output_ids) for part in self._parts) >= most:
            self._parts[-1], self._ended = replace(last, finish_reason="length"), True
        return self._ended

    def _straddling(self) -> tuple[int, str] | None:
        """A stop string over the join, which no part's engine could see: the tokens of the last part up to it."""
        before = [token for part in self._parts[:-1] for token in part.output_ids]
        return straddling(before, self._parts[-1].output_ids, self._sampling.stop, self._decode)

    def _stamped(self, part: Generation, passage: Passage) -> Generation:
        spans, known = stamped(part.policy_versions, passage.versions, len(part.output_ids))
        if not known:
            self.flags = tuple(dict.fromkeys((*self.flags, "unknown_policy_version")))
        return part if spans == part.policy_versions else replace(part, policy_versions=spans)


def joined(parts: Sequence[Generation]) -> Generation:
    """One generation of several; spans in the coordinates of the whole."""
    if len(parts) == 1:
        return parts[0]
    ids: list[int] = []
    spans: list[Span] = []
    for part in parts:
        place = len(ids)
        spans += [{**span, "start": place + span["start"], "end": place + span["end"]} for span in part.policy_versions]
        ids += part.output_ids
    logprobs = [value for part in parts for value in part.logprobs or ()]
    first, last = parts[0], parts[-1]
    timings = {**last.timings, "parts": [len(part.output_ids) for part in parts]}
    if "cached_tokens" in timings:
        timings["cached_tokens"] = first.timings.get("cached_tokens", 0)
    return replace(
        last,
        output_ids=ids,
        logprobs=logprobs if len(logprobs) == len(ids) else None,
        policy_versions=spans,
        prompt_ids=first.prompt_ids,
        prompt_tokens=first.prompt_tokens,
        timings=timings,
    )


def stamped(
    reported: Sequence[Span], seen: Sequence[tuple[int | None, Version | None]], length: int
) -> tuple[list[Span], bool]:
    """The version spans of a part, and whether they are all that there is to know.

    What the engine reports wins. An engine that was never told a version reports none, or SGLang's word for none;
    then the policy's versions count that were `seen` while it sampled, each from a token on."""
    if any(span.get("version") not in (None, UNNAMED) for span in reported) or seen[-1][1] is None:
        return list(reported), True
    starts = [start for start, _ in seen]
    if None in starts:
        return [], False
    ends = [*starts[1:], length]
    spans = [
        {"version": version, "start": start, "end": end}
        for (start, version), end in zip(seen, ends, strict=True)
        if version is not None and start != end
    ]
    return spans, seen[0][1] is not None


def straddling(
    before: list[int], ids: list[int], stops: Sequence[str], decode: Callable[[list[int]], str]
) -> tuple[int, str] | None:
    """The stop string that begins in `before` and ends in `ids`: how many of these it takes, and which it is."""
    # A token is at least a byte, but for those that print nothing.
    longest = max(len(stop.encode()) for stop in stops)
    tail = before[-longest:]
    for end in range(1, min(len(ids), longest) + 1):
        text = decode(tail + ids[:end])
        if found := [stop for stop in stops if stop in text]:
            return end, min(found, key=text.index)
    return None


def shortened(part: Generation, length: int, stop: str) -> Generation:
    """A part up to the token that completes this stop string."""
    spans = [{**span, "end": min(span["end"], length)} for span in part.policy_versions if span["start"] < length]
    logprobs = None if part.logprobs is None else part.logprobs[:length]
    return replace(
        part,
        output_ids=part.output_ids[:length],
        logprobs=logprobs,
        policy_versions=spans,
        finish_reason="stop",
        matched_stop=stop,
    )
