"""What the proxy reads: short queries, again if the database restarts.

A connection is not tested before use, for that costs as much as the query; a query that finds it dead is
repeated instead, which a read may always be. Writes are `recorder`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ClauseElement

from polar.errors import NodeError
from polar.proxy.database import AWAY, Database, compiled

CONNECTIONS = 8
PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0)


class Reads:
    """Each query is a transaction of its own, without the round trips to say so."""

    def __init__(self, url: str, patience: float) -> None:
        """`patience`: seconds that a database which is away is waited for."""
        self._database = Database(url, CONNECTIONS)
        self._patience = patience

    async def all(self, query: ClauseElement, **values: Any) -> Sequence[Any]:
        """Every row, its columns as attributes. Raises NodeError when the database stays away."""
        statement = compiled(query)
        until = asyncio.get_running_loop().time() + self._patience
        tries = 0
        while True:
            try:
                async with self._database.connection() as db:
                    cursor = await db.execute(statement.text, {**statement.fixed, **values}, binary=True)
                    return await cursor.fetchall()
            except AWAY as error:
                pause = PAUSES[min(tries, len(PAUSES) - 1)]
                if asyncio.get_running_loop().time() + pause > until:
                    raise NodeError("the proxy's database does not answer", code="database_down") from error
                tries += 1
                await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections."""
        await self._database.close()
