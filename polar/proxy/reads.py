"""What the proxy reads: short queries, again if the database restarts.

A connection is not tested before use, for that costs as much as the query; a query that finds it dead is
repeated instead, which a read may always be. Writes are `recorder`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ClauseElement

from polar.proxy.database import Database, compiled

CONNECTIONS = 8


class Reads:
    """Each query is a transaction of its own, without the round trips to say so."""

    def __init__(self, url: str, patience: float) -> None:
        """`patience`: seconds that a database which is away is waited for."""
        self._database = Database(url, CONNECTIONS)
        self._patience = patience

    async def all(self, query: ClauseElement, **values: Any) -> Sequence[Any]:
        """Every row, its columns as attributes. Raises NodeError when the database stays away."""
        statement = compiled(query)
        return await self._database.patiently(statement.text, statement.arguments(values), self._patience)

    async def close(self) -> None:
        """Close the connections."""
        await self._database.close()
