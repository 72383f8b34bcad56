"""Alembic migrations, in the package so that an installed wheel can migrate too."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

FOLDER = Path(__file__).parent


def config(database_url: str) -> Config:
    """Alembic's configuration for this database."""
    made = Config(FOLDER / "alembic.ini")
    made.attributes["database_url"] = database_url
    return made


def upgrade(database_url: str) -> None:
    """Bring the database to the newest version; several processes may call it at once."""
    command.upgrade(config(database_url), "head")


def missing(connection: Connection) -> list[str]:
    """The versions that this database has yet to be brought to, in order."""
    script = ScriptDirectory.from_config(config(""))
    here = MigrationContext.configure(connection).get_current_heads()
    done = {each.revision for head in here for each in script.iterate_revisions(head, "base")}
    return [each.revision for each in script.walk_revisions() if each.revision not in done][::-1]
