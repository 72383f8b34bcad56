"""Events that a call waits for beside its own work, without a task for each of them.

A call listens for a hang-up and for the gate as long as its engine works, and hardly ever hears of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Signal(asyncio.Event):
    """An event that calls whoever listens."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[], None]] = []

    def set(self) -> None:
        """Wake those who wait, and call those who listen."""
        super().set()
        for listener in list(self.listeners):
            listener()


async def until_any(work: asyncio.Future[Any], *signals: Signal, seconds: float) -> None:
    """Wait until `work` is done, one of the signals is set, or the time is up; cancels nothing."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    work.add_done_callback(end)
    clock = loop.call_later(seconds, end)
    for signal in signals:
        signal.listeners.append(end)
    try:
        if not any(signal.is_set() for signal in signals):
            await over
    finally:
        clock.cancel()
        work.remove_done_callback(end)
        for signal in signals:
            signal.listeners.remove(end)
