"""Postgres: engines, transactions, and work that waits for the commit.

Knows nothing of tasks or sessions. `db` is always SQLAlchemy's handle; a `session` is always a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import InterfaceError, InvalidatePoolError, OperationalError
from sqlalchemy.orm import Session

from polar import clock

AWAY = (OperationalError, InterfaceError)
"""What a database looks like that restarts, cannot be reached, or has no room left on its disk."""
CLIENT: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
}
"""A line that is cut says nothing: within some ten seconds a connection over it is given up."""
SERVER = """
    SELECT set_config(name, setting, false) FROM (VALUES
        ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'),
        ('tcp_user_timeout', '10000'), ('idle_in_transaction_session_timeout', '60000')) AS wanted (name, setting)
"""
"""The same at the server's end: what a node that was cut off had locked is free again soon after."""

LATELY_SECONDS = 0.1
"""A connection that was used this lately is not tested before it is used again: Postgres restarts in no less, and the
test is a round trip of its own for each of a session's some thirty transactions."""


def normal_url(url: str) -> str:
    """`postgres://` and `postgresql://` as users write them, with the driver that Polar uses."""
    for prefix in ("postgres://", "postgresql://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    return url


def connect(url: str, *, pool_size: int = 8) -> Engine:
    """An engine whose connections are tested before use, so that a database restart costs no request.

    Using one keeps this process's clock with the database's."""
    # The one that was used last comes first, so that a busy process has few that must be tested.
    pool = {"pool_size": pool_size, "max_overflow": pool_size, "pool_use_lifo": True}
    made = create_engine(normal_url(url), **pool, connect_args=CLIENT)

    @event.listens_for(made, "connect")
    def _tell_the_server(connection: Any, _: Any) -> None:
        connection.execute(SERVER)
        connection.commit()

    @event.listens_for(made, "checkin")
    def _note_the_time(_: Any, record: Any) -> None:
        record.info["left"] = clock.steady()

    @event.listens_for(made, "checkout")
    def _test(connection: Any, record: Any, _: Any) -> None:
        if clock.steady() - record.info.get("left", 0.0) < LATELY_SECONDS:
            return
        try:
            made.dialect.do_ping(connection)
        except made.dialect.loaded_dbapi.Error as error:
            if not made.dialect.is_disconnect(error, connection, None):
                raise
            raise InvalidatePoolError from error  # all of them are as old: the pool opens new ones

    event.listen(made, "checkout", _ask_the_time)
    return made


def _ask_the_time(connection: Any, *_: Any) -> None:
    if clock.CLOCK.due():
        with connection.cursor() as cursor:
            asked = clock.steady()
            cursor.execute(clock.QUERY)
            clock.CLOCK.heard(cursor.fetchone()[0], asked)
        connection.rollback()


def after_commit(db: Session, action: Callable[[], Any]) -> None:
    """Run `action` once the transaction is committed, and never if it rolls back."""
    db.info.setdefault("after_commit", []).append(action)


@contextmanager
def transaction(engine: Engine) -> Iterator[Session]:
    """One transaction: commits at the end, rolls back on any error, then runs what waited for the commit."""
    with Session(engine, expire_on_commit=False) as db:
        with db.begin():
            yield db
        for action in db.info.pop("after_commit", []):
            action()
