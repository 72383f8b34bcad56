"""The proxy's own way to Postgres: psycopg with prepared statements, on a few connections that stay open.

SQLAlchemy writes the queries, once; it does not run them, because on a model call's path its execution alone costs
more than all that the proxy does beside. Each query is its own transaction, unless one is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb, set_json_dumps, set_json_loads
from sqlalchemy import JSON, ClauseElement
from sqlalchemy.dialects.postgresql import psycopg as dialect
from sqlalchemy.sql.compiler import SQLCompiler

from polar import clock
from polar.db import CLIENT, SERVER

AWAY = (psycopg.OperationalError, psycopg.InterfaceError)
"""What a database that restarts looks like."""
Connection = psycopg.AsyncConnection[Any]


@dataclass(frozen=True, slots=True)
class Query:
    """A statement as the driver takes it."""

    text: str
    fixed: Mapping[str, Any]
    """Parameters that the statement itself brings."""


@cache
def compiled(statement: ClauseElement) -> Query:
    """SQLAlchemy's text of a statement that is a constant of its module."""
    found = statement.compile(dialect=dialect.dialect())
    assert isinstance(found, SQLCompiler)
    fixed = {
        name: Jsonb(found.params[name]) if isinstance(bind.type, JSON) else found.params[name]
        for bind, name in found.bind_names.items()
        if not bind.required
    }
    return Query(str(found), fixed)


class Database:
    """Connections, opened when they are needed and kept."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url.replace("postgresql+psycopg://", "postgresql://", 1)
        self._free: list[Connection] = []
        self._slots = asyncio.Semaphore(size)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """One connection for as long as the block takes; a broken one is not used again."""
        async with self._slots:
            connection = self._free.pop() if self._free else await self._connect()
            try:
                if clock.CLOCK.due():
                    await _ask_the_time(connection)
                yield connection
            except BaseException:
                # Whatever went wrong in the middle of a query, cancellation included, nobody may inherit.
                await connection.close()
                raise
            self._free.append(connection)

    async def close(self) -> None:
        """Close what is free."""
        while self._free:
            await self._free.pop().close()

    async def _connect(self) -> Connection:
        connection = await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, prepare_threshold=0, row_factory=namedtuple_row, **CLIENT
        )
        await connection.execute(SERVER)
        set_json_loads(orjson.loads, connection)
        set_json_dumps(orjson.dumps, connection)
        return connection


async def _ask_the_time(connection: Connection) -> None:
    asked = clock.steady()
    row = await (await connection.execute(clock.QUERY)).fetchone()
    assert row is not None
    clock.CLOCK.heard(row[0], asked)
