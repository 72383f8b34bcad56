"""What the proxy reads: short queries on a few connections that stay open, again if the database restarts.

A connection is not tested before use, for that costs as much as the query; a query that finds it dead is
repeated instead, which a read may always be. Writes are `recorder`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Executable, Row
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from polar.db import normal_url
from polar.errors import NodeError

CONNECTIONS = 8
PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0)


class Reads:
    """Each query is a transaction of its own, without the round trips to say so."""

    def __init__(self, url: str, patience: float) -> None:
        """`patience`: seconds that a database which is away is waited for."""
        self._database = create_async_engine(
            normal_url(url),
            pool_size=CONNECTIONS,
            # A connection over the limit would be closed after one query, and opening one costs ten queries.
            max_overflow=0,
            isolation_level="AUTOCOMMIT",
        )
        self._patience = patience

    async def all(self, query: Executable, **values: Any) -> Sequence[Row[Any]]:
        """Every row. Raises NodeError when the database stays away."""
        until = asyncio.get_running_loop().time() + self._patience
        tries = 0
        while True:
            try:
                async with self._database.connect() as db:
                    return (await db.execute(query, values)).all()
            except (OperationalError, InterfaceError) as error:
                pause = PAUSES[min(tries, len(PAUSES) - 1)]
                if asyncio.get_running_loop().time() + pause > until:
                    raise NodeError("the proxy's database does not answer", code="database_down") from error
                tries += 1
                await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections."""
        await self._database.dispose()
