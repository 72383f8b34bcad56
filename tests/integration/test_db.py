"""Connections that Postgres has ended: found out before they are used, and asked for only where it can matter."""

from __future__ import annotations

import time

from sqlalchemy import Engine, event, text

from polar.db import LATELY_SECONDS, connect, transaction


def test_a_connection_that_was_ended_while_it_was_idle_costs_no_transaction(database: Engine) -> None:
    """After a pause, connections are tested: those that Postgres has ended are replaced unnoticed."""
    mine = connect(database.url.render_as_string(hide_password=False), pool_size=2)
    with transaction(mine) as first, transaction(mine) as second:
        pids = {db.scalar(text("SELECT pg_backend_pid()")) for db in (first, second)}
    with transaction(database) as db:
        db.execute(text("SELECT pg_terminate_backend(pid) FROM unnest(:pids) pid"), {"pids": list(pids)})
    time.sleep(2 * LATELY_SECONDS)
    with transaction(mine) as first, transaction(mine) as second:
        assert not pids & {db.scalar(text("SELECT pg_backend_pid()")) for db in (first, second)}
    mine.dispose()


def test_a_busy_process_keeps_using_the_same_connection(database: Engine) -> None:
    """Transactions one after the other share the connection that was used last, which is then hardly ever tested."""
    mine = connect(database.url.render_as_string(hide_password=False), pool_size=4)
    opened: list[object] = []
    event.listen(mine, "connect", lambda connection, _: opened.append(connection))
    pids = set()
    for _ in range(5):
        with transaction(mine) as db:
            pids.add(db.scalar(text("SELECT pg_backend_pid()")))
    assert len(pids) == len(opened) == 1
    mine.dispose()
