"""Work that would hold up every other call of the process, done in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(heavy: bool, work: Callable[[], T]) -> T:
    """Do `work`, in a thread if it is heavy."""
    return await asyncio.to_thread(work) if heavy else work()
