"""How Alembic reaches the database: the URL of the caller, or the settings'."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from polar.db import connect
from polar.models import Model
from polar.settings import Settings

MIGRATION_LOCK = 7_362_001
"""Any constant will do: whoever holds this advisory lock migrates, the others wait and find it done."""


def run() -> None:
    url = context.config.attributes.get("database_url") or Settings.load().database_url
    engine = connect(url, pool_size=1)
    with engine.connect() as connection:
        connection.execute(text("SET lock_timeout = '15s'"))
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": MIGRATION_LOCK})
        connection.commit()
        context.configure(connection=connection, target_metadata=Model.metadata, compare_type=True)
        with context.begin_transaction():
            context.run_migrations()
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": MIGRATION_LOCK})
        connection.commit()
    engine.dispose()


run()
