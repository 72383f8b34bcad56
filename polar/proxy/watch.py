"""A process's ear for the policy and its voice in `proxies`: told of changes, and at the latest a beat later it looks.

Beats at once while somebody may be waiting for what the gate reports. A database that is away is waited for: what the
gate last heard holds until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from dataclasses import astuple

from polar.log import line
from polar.policy import CHANNEL, PROXY_REMEMBERED_SECONDS
from polar.proxy.database import FAILED, Database
from polar.proxy.gate import Gate, Report, policy_of
from polar.weights import CHANNEL as WEIGHTS_CHANNEL

logger = logging.getLogger(__name__)

AT_ONCE = 0.02
"""Seconds between two beats of which the second follows news: a busy gate must not keep the database busy."""
AGAIN = 1.0
"""Seconds until a connection that broke is made anew."""
PATIENCE = 5.0
"""Seconds that one look may take."""
BEAT = """
    WITH beat AS (
        INSERT INTO proxies (id, node_id, epoch, in_flight, held, drained, aborted, started_at, heartbeat_at)
        VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp(), clock_timestamp())
        ON CONFLICT (id) DO UPDATE SET
            epoch = excluded.epoch, in_flight = excluded.in_flight, held = excluded.held,
            drained = excluded.drained, aborted = excluded.aborted, heartbeat_at = excluded.heartbeat_at
    )
    SELECT version, gate, epoch FROM policy
"""
FORGET = "DELETE FROM proxies WHERE heartbeat_at < clock_timestamp() - make_interval(secs => $1)"
SIGN_OFF = "DELETE FROM proxies WHERE id = $1"


class Watch:
    """One process's."""

    def __init__(self, url: str, node_id: str, gate: Gate, beat: float) -> None:
        """`beat`: seconds between two looks when nothing is heard."""
        self.pushed = asyncio.Event()
        """Set when a weight push was asked for: it is heard over the same connection."""
        self.id = f"{node_id}/{socket.gethostname()}:{os.getpid()}/{uuid.uuid4().hex[:6]}"
        self._node_id = node_id
        self._database = Database(url, 2)
        self._gate = gate
        self._beat = beat
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Look once, so that no call comes to a process that nobody knows of; then go on in the background."""
        with contextlib.suppress(*FAILED):
            await self._look(self._gate.report())
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Sign off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(*FAILED):
            async with asyncio.timeout(AGAIN), self._database.connection() as db:
                await db.execute(SIGN_OFF, self.id)
        await self._database.close()

    async def _watch(self) -> None:
        while True:
            self._gate.news.clear()
            told = self._gate.report()
            try:
                await self._look(told)
            except FAILED as error:
                logger.warning(line("the policy could not be read", error=type(error).__name__))
                await asyncio.sleep(AGAIN)
                continue
            # Not wait_for, which may swallow a cancellation that comes together with the news, and go on for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat):
                    await self._gate.news.wait()
                await asyncio.sleep(AT_ONCE)

    async def _look(self, told: Report) -> None:
        async with asyncio.timeout(PATIENCE), self._database.connection() as db:
            row = await db.fetchrow(BEAT, self.id, self._node_id, *astuple(told))
        before = self._gate.policy
        self._gate.see(policy_of(*row) if row else policy_of(None, None, None))
        if self._gate.policy.gate != before.gate and before.epoch >= 0:
            logger.info(line("gate", now=self._gate.policy.gate, epoch=self._gate.policy.epoch))

    async def _listen(self) -> None:
        """Wake the watch at every change. What this misses, the next beat sees."""
        while True:
            try:
                async with self._database.connection() as db:
                    broken = asyncio.Event()
                    db.add_termination_listener(lambda _, broken=broken: broken.set())
                    await db.execute(FORGET, float(PROXY_REMEMBERED_SECONDS))
                    await db.add_listener(CHANNEL, self._hear)
                    await db.add_listener(WEIGHTS_CHANNEL, self._hear_push)
                    self._gate.news.set()
                    await broken.wait()
                    logger.warning(line("no news of the policy; looking instead"))
            except FAILED as error:
                logger.warning(line("no news of the policy; looking instead", error=type(error).__name__))
            await asyncio.sleep(AGAIN)

    def _hear(self, *_: object) -> None:
        self._gate.news.set()

    def _hear_push(self, *_: object) -> None:
        self.pushed.set()
