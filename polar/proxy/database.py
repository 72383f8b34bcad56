"""The proxy's own way to Postgres: asyncpg with prepared statements, on a few connections that stay open.

SQLAlchemy writes the queries, once; it does not run them, because on a model call's path its execution alone costs
more than all that the proxy does beside. Each statement is its own transaction, unless one is opened.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

import asyncpg
import orjson
from sqlalchemy import ClauseElement
from sqlalchemy.dialects.postgresql import asyncpg as dialect
from sqlalchemy.sql.compiler import SQLCompiler

from polar import clock
from polar.errors import NodeError

AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.TransactionRollbackError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    asyncpg.InternalClientError,
    OSError,
)
"""What a database that restarts looks like; what a connection that broke says of itself, `lost` tells."""
FAILED = (asyncpg.PostgresError, asyncpg.InterfaceError, *AWAY)
"""Whatever may come of a statement."""
CONNECT_SECONDS = 10.0
STATEMENT_SECONDS = 10.0
"""A line that is cut says nothing: what takes longer than this is taken for one, and tried again over another."""
PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0)
SETTINGS = {
    # Every statement of the proxy finds its few rows by their keys. A plan is made once and kept, maybe while the
    # tables are empty and reading them whole looks cheap; an hour later that same plan would read millions of rows.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    # A line that is cut says nothing: what a node that was cut off had locked is free again soon after.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "idle_in_transaction_session_timeout": "60000",
}
CLIENT_ONLY = re.compile(
    "channel_binding|client_encoding|connect_timeout|fallback_.*|gss.*|hostaddr|keepalives.*|load_.*|tcp_.*"
)
"""Parameters of a URL that are libpq's own affair; sent to a server, they are errors."""
Connection = Any
"""asyncpg's, which has no types."""


class Row(asyncpg.Record):
    """Its columns are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass(frozen=True, slots=True)
class Query:
    """A statement as the driver takes it."""

    text: str
    fixed: tuple[Any, ...]
    """Its parameters in order; of those that a caller gives, the place."""
    open: tuple[tuple[int, str], ...]
    """Places and names of the parameters that a caller gives."""

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """All parameters, in order."""
        found = list(self.fixed)
        for place, name in self.open:
            found[place] = values[name]
        return found


@cache
def compiled(statement: ClauseElement) -> Query:
    """SQLAlchemy's text of a statement that is a constant of its module."""
    found = statement.compile(dialect=dialect.dialect())
    assert isinstance(found, SQLCompiler)
    assert found.positiontup is not None
    required = {name for bind, name in found.bind_names.items() if bind.required}
    fixed = tuple(None if name in required else found.params[name] for name in found.positiontup)
    return Query(str(found), fixed, tuple((at, name) for at, name in enumerate(found.positiontup) if name in required))


class Database:
    """Connections, opened when they are needed and kept."""

    def __init__(self, url: str, size: int) -> None:
        self._url = plain(url)
        self._free: list[Connection] = []
        self._slots = asyncio.Semaphore(size)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """One connection for as long as the block takes; a broken one is not used again."""
        async with self._slots:
            connection = await self._take()
            try:
                if clock.CLOCK.due():
                    await _ask_the_time(connection)
                yield connection
            except BaseException:
                # Whatever went wrong in the middle of a query, cancellation included, nobody may inherit.
                connection.terminate()
                raise
            self._free.append(connection)

    async def patiently(self, text: str, arguments: Sequence[Any], patience: float) -> list[Any]:
        """The rows of one statement, which is repeated through a restart of the database, if need be.

        Raises NodeError once that takes longer than `patience` seconds."""
        async with self._slots:
            tries, until = 0, 0.0
            while True:
                connection = None
                try:
                    connection = await self._take()
                    found: list[Any] = await connection.fetch(text, *arguments)
                except BaseException as error:
                    if connection is not None:
                        connection.terminate()
                    if not away(error):
                        raise
                    clock, pause = asyncio.get_running_loop().time(), PAUSES[min(tries, len(PAUSES) - 1)]
                    until = until or clock + patience
                    if clock + pause > until:
                        raise NodeError("the proxy's database does not answer", code="database_down") from error
                    tries += 1
                    await asyncio.sleep(pause)
                else:
                    self._free.append(connection)
                    return found

    async def close(self) -> None:
        """Close what is free."""
        while self._free:
            self._free.pop().terminate()

    async def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                return connection
        connection = await asyncpg.connect(
            self._url,
            record_class=Row,
            server_settings=SETTINGS,
            timeout=CONNECT_SECONDS,
            command_timeout=STATEMENT_SECONDS,
        )
        await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=_dumped, decoder=_loaded, format="binary")
        return connection


async def _ask_the_time(connection: Connection) -> None:
    asked = clock.steady()
    clock.CLOCK.heard(await connection.fetchval(clock.QUERY), asked)


def away(error: BaseException) -> bool:
    """Whether a statement failed because the database was not there, so that it may be repeated."""
    return isinstance(error, AWAY) or type(error) is asyncpg.InterfaceError


def plain(url: str) -> str:
    """A URL of SQLAlchemy's or libpq's as asyncpg takes it."""
    base, _, query = url.replace("postgresql+psycopg://", "postgresql://", 1).partition("?")
    kept = urlencode([(name, value) for name, value in parse_qsl(query) if not CLIENT_ONLY.fullmatch(name)])
    return f"{base}?{kept}" if kept else base


def _dumped(value: Any) -> bytes:
    # The one version there is of jsonb's binary form. Bytes are JSON already: a list in an array would be taken for
    # one more dimension of it.
    return b"\x01" + (value if isinstance(value, bytes) else orjson.dumps(value))


def _loaded(data: bytes) -> Any:
    return orjson.loads(memoryview(data)[1:])
