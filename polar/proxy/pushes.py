"""The weight pushes of one node, done by whichever of its proxy processes is first.

Asks each lane's engine to take a checkpoint, has it score what the trainer says that the new weights score, and writes
down what came of it. What is asked for is `polar.weights`'; that nothing is sampled meanwhile is the gate's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import Any

from polar.engines.parity import Sample, check
from polar.errors import EngineError
from polar.log import line
from polar.proxy.database import FAILED, Database
from polar.proxy.pool import EnginePool
from polar.weights import CLAIM_SECONDS

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Between two looks when nothing is heard."""
RENEW_SECONDS = 2.0
AGAIN = 1.0
CLAIM = """
    UPDATE weight_pushes p SET state = 'running', claimed_by = $1, claimed_at = clock_timestamp()
    FROM lanes l
    WHERE l.name = p.lane AND (p.push_id, p.lane) = (
        SELECT push_id, lane FROM weight_pushes
        WHERE node_id = $2 AND (state = 'queued' OR (state = 'running'
              AND claimed_at < clock_timestamp() - make_interval(secs => $3)))
        ORDER BY created_at, lane LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING p.push_id, p.lane, p.version, p.path, p.probe, l.engine
"""
RENEW = """
    UPDATE weight_pushes SET claimed_at = clock_timestamp()
    WHERE push_id = $1 AND lane = $2 AND state = 'running' AND claimed_by = $3
"""
SETTLE = """
    UPDATE weight_pushes SET state = $4, error = $5, difference = $6, seconds = $7,
           ended_at = clock_timestamp()
    WHERE push_id = $1 AND lane = $2 AND state = 'running' AND claimed_by = $3
"""


class Pushes:
    """One process's part."""

    def __init__(self, url: str, node_id: str, pool: EnginePool, news: asyncio.Event) -> None:
        """`news` is set when a push was asked for."""
        self._by = uuid.uuid4().hex
        self._node_id = node_id
        self._pool = pool
        self._news = news
        self._database = Database(url, 2)
        self._task: asyncio.Task[None] | None = None
        self._pushing: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Look in the background."""
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """What is under way is left to another process."""
        tasks = [*self._pushing, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.close()

    async def _watch(self) -> None:
        while True:
            self._news.clear()
            try:
                while (row := await self._claim()) is not None:
                    task = asyncio.create_task(self._push(row))
                    self._pushing.add(task)
                    task.add_done_callback(self._pushing.discard)
            except FAILED as error:
                logger.warning(line("weight pushes could not be read", error=type(error).__name__))
                await asyncio.sleep(AGAIN)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()

    async def _claim(self) -> Any:
        async with self._database.connection() as db:
            return await db.fetchrow(CLAIM, self._by, self._node_id, CLAIM_SECONDS)

    async def _push(self, row: Any) -> None:
        began = time.monotonic()
        renewing = asyncio.create_task(self._renew(row))
        state, error, difference = "done", None, None
        try:
            difference = await self._take(row)
        except EngineError as failure:
            state, error = "failed", failure.message
        except Exception as bug:
            logger.exception(line("weight push broke", lane=row["lane"]))
            state, error = "failed", f"a bug of Polar's, {type(bug).__name__}; the proxy's log says more"
        finally:
            renewing.cancel()
        seconds = time.monotonic() - began
        logger.info(
            line("weight push", lane=row["lane"], version=row["version"], state=state, seconds=round(seconds, 3))
        )
        await self._write(SETTLE, row, state, error, difference, seconds)

    async def _take(self, row: Any) -> float | None:
        """The probe's mean difference, if there is a probe. Raises EngineError."""
        link = await self._pool.link(row["lane"], row["engine"])
        await link.engine.update_weights(row["path"], row["version"])
        if row["probe"] is None:
            return None
        sample = Sample(**row["probe"])
        alarm = link.spec.parity_alarm
        parity = await check(link.engine, [sample], tokens=len(sample.output_ids), alarm=alarm)
        if not parity.well:
            said = f"the engine answered that it has the new weights, but scores the probe {parity.mean:.3g} nats off"
            raise EngineError(f"{said} on average, more than {alarm:g}: it samples with others", code="parity")
        return parity.mean

    async def _renew(self, row: Any) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with contextlib.suppress(*FAILED):
                await self._write(RENEW, row)

    async def _write(self, statement: str, row: Any, *values: Any) -> None:
        async with self._database.connection() as db:
            await db.execute(statement, row["push_id"], row["lane"], self._by, *values)
