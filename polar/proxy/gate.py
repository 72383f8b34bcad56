"""The gate of one process: whether a call may go to its engine now, and which calls are there.

Fed by whoever read the policy's row last: each call with its caller, and `watch`. A call asks here and goes in the
same step of the event loop, so that a process that has said it holds cannot begin anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from polar.policy import GateMode, Version, spelled
from polar.proxy import metrics
from polar.proxy.signals import Signal


@dataclass(frozen=True, slots=True)
class PolicyNow:
    """The policy's row as it was read; more epoch is later."""

    version: Version | None
    gate: str
    epoch: int

    @property
    def open(self) -> bool:
        return self.gate == GateMode.OPEN


NEVER_READ = PolicyNow(None, GateMode.DRAIN, -1)
"""Nothing begins in a process that does not know whether it may."""
UNSET = PolicyNow(None, GateMode.OPEN, 0)
"""Nobody has said anything of the policy yet."""


def policy_of(version: str | None, gate: str | None, epoch: int | None) -> PolicyNow:
    """From the row's columns; all are None where there is no row."""
    return UNSET if gate is None or epoch is None else PolicyNow(spelled(version), gate, epoch)


class ShutError(Exception):
    """The gate is not open; wait for it, and then try."""


@dataclass(eq=False, slots=True)
class Passage:
    """One call at its engine."""

    versions: list[tuple[int | None, Version | None]]
    """The policy's versions while it was there: from which token on, None where that is not known."""
    streams: bool
    heard: int = 0
    """Tokens that came so far, where the engine streams."""
    recalled: Signal = field(default_factory=Signal)
    """The gate was closed in mode abort: hand over what there is."""
    cut: bool = False
    """It was ended before its time."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a process tells of itself in its row of `proxies`."""

    epoch: int
    in_flight: int
    held: int
    drained: int
    aborted: int


class Gate:
    """Open, or closed in one of two modes."""

    def __init__(self) -> None:
        self.policy = NEVER_READ
        self.news = asyncio.Event()
        """Set when the report says something that somebody may be waiting for."""
        self._moved = asyncio.Event()
        self._passages: set[Passage] = set()
        self._held = 0
        self._drained = 0
        self._aborted = 0
        self._closed_at: float | None = None
        self._closed_seconds = 0.0

    def closed_seconds(self) -> float:
        """How long this process has known the gate closed, in all."""
        return self._closed_seconds + (0.0 if self._closed_at is None else time.monotonic() - self._closed_at)

    def see(self, policy: PolicyNow) -> None:
        """Act on a reading of the policy's row, unless a later one is known."""
        if policy.epoch <= self.policy.epoch:
            return
        before, self.policy = self.policy, policy
        if policy.open:
            self._closed_seconds, self._closed_at = self.closed_seconds(), None
        elif self._closed_at is None:
            self._closed_at = time.monotonic()
        if before.open and not policy.open:
            self._drained = self._aborted = 0
        for passage in self._passages:
            if policy.version != passage.versions[-1][1]:
                passage.versions.append((passage.heard if passage.streams else None, policy.version))
            if policy.gate == GateMode.ABORT:
                passage.recalled.set()
        self._moved.set()
        self._moved = asyncio.Event()
        self.news.set()

    async def opened(self, hangup: asyncio.Event, seconds: float) -> bool:
        """Wait until the gate is open; False if somebody hung up or the time is up first."""
        until = asyncio.get_running_loop().time() + seconds
        if self.policy.open:
            return True
        self._held += 1
        metrics.HELD.inc()
        self.news.set()
        gone = asyncio.create_task(hangup.wait())
        try:
            while not self.policy.open:
                left = until - asyncio.get_running_loop().time()
                if gone.done() or left <= 0:
                    return False
                moved = asyncio.create_task(self._moved.wait())
                await asyncio.wait({gone, moved}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                moved.cancel()
            return True
        finally:
            gone.cancel()
            self._held -= 1
            metrics.HELD.dec()
            self.news.set()

    @contextmanager
    def passage(self, *, streams: bool) -> Iterator[Passage]:
        """Be at the engine while inside. Raises ShutError."""
        if not self.policy.open:
            raise ShutError
        passage = Passage([(0, self.policy.version)], streams)
        self._passages.add(passage)
        metrics.IN_FLIGHT.inc()
        try:
            yield passage
        finally:
            self._passages.discard(passage)
            metrics.IN_FLIGHT.dec()
            if passage.cut:
                self._aborted += 1
            elif not self.policy.open:
                self._drained += 1
            if not self.policy.open:
                self.news.set()

    def report(self) -> Report:
        """As it is now."""
        return Report(self.policy.epoch, len(self._passages), self._held, self._drained, self._aborted)
