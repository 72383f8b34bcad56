"""The gate of one process: who may pass, who waits, and what it reports of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from polar.policy import GateMode
from polar.proxy.gate import Gate, PolicyNow, Report, ShutError, policy_of

T = TypeVar("T")


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Do `work` on a loop of its own."""

    async def main() -> T:
        return await work()

    return asyncio.run(main())


def at(epoch: int, gate: str = "open", version: int | str | None = None) -> PolicyNow:
    return PolicyNow(version, gate, epoch)


def test_a_process_that_has_not_read_the_policy_lets_nothing_through() -> None:
    """Nobody knows of it yet, so nobody could have told it to hold."""

    async def work() -> None:
        gate = Gate()
        with pytest.raises(ShutError), gate.passage(streams=False):
            raise AssertionError("inside")
        assert not await gate.opened(asyncio.Event(), 0.05)
        gate.see(policy_of(None, None, None))
        assert await gate.opened(asyncio.Event(), 0)

    run(work)


def test_the_later_reading_wins() -> None:
    """A call that read the row before it changed cannot open a gate that was closed since."""

    async def work() -> None:
        gate = Gate()
        gate.see(at(2, GateMode.DRAIN))
        gate.see(at(1))
        assert gate.policy.gate == GateMode.DRAIN
        gate.see(at(3))
        assert gate.policy.open

    run(work)


def test_waiting_ends_with_resume_a_hang_up_or_the_time() -> None:
    """Those who wait are counted for as long as they do."""

    async def work() -> None:
        gate, hangup = Gate(), asyncio.Event()
        gate.see(at(1, GateMode.DRAIN))
        waiting = [asyncio.create_task(gate.opened(event, 5)) for event in (asyncio.Event(), hangup)]
        assert not await gate.opened(asyncio.Event(), 0.05)
        assert gate.report().held == 2
        hangup.set()
        assert not await waiting[1]
        gate.see(at(2, GateMode.ABORT))
        await asyncio.sleep(0.01)
        assert not waiting[0].done()
        gate.see(at(3))
        assert await waiting[0]
        assert gate.report() == Report(epoch=3, in_flight=0, held=0, drained=0, aborted=0)

    run(work)


def test_drain_lets_calls_end_and_abort_recalls_them() -> None:
    """Each call is counted by how it left, from one closing to the next."""

    async def work() -> None:
        gate = Gate()
        gate.see(at(1))
        with gate.passage(streams=False) as one, gate.passage(streams=False) as other:
            gate.see(at(2, GateMode.DRAIN))
            assert not one.recalled.is_set()
            assert gate.report().in_flight == 2
            with pytest.raises(ShutError), gate.passage(streams=False):
                raise AssertionError("inside")
            gate.see(at(3, GateMode.ABORT))
            assert one.recalled.is_set()
            other.cut = True
        assert gate.report() == Report(epoch=3, in_flight=0, held=0, drained=1, aborted=1)
        gate.see(at(4))
        gate.see(at(5, GateMode.DRAIN))
        assert gate.report() == Report(epoch=5, in_flight=0, held=0, drained=0, aborted=0)

    run(work)


def test_a_call_notes_where_the_version_changed() -> None:
    """At the token where it is when the change is heard of; nowhere, if its engine does not stream."""

    async def work() -> None:
        gate = Gate()
        gate.see(at(1, version=7))
        with gate.passage(streams=True) as one, gate.passage(streams=False) as other:
            one.heard = 4
            gate.see(at(2, version=8))
            gate.see(at(3, GateMode.DRAIN, version=8))
        assert one.versions == [(0, 7), (4, 8)]
        assert other.versions == [(0, 7), (None, 8)]

    run(work)


def test_versions_are_numbers_where_they_can_be() -> None:
    """What the trainer set as 12 goes out as 12, and what only looks like it stays a word."""
    assert [policy_of(text, "open", 1).version for text in ("12", "012", "-3", "step-4", None)] == [
        12,
        "012",
        -3,
        "step-4",
        None,
    ]
