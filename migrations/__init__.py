"""Alembic migrations, in the package so that an installed wheel can migrate too."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

FOLDER = Path(__file__).parent


def config(database_url: str) -> Config:
    """Alembic's configuration for this database."""
    made = Config(FOLDER / "alembic.ini")
    made.attributes["database_url"] = database_url
    return made


def upgrade(database_url: str) -> None:
    """Bring the database to the newest version; several processes may call it at once."""
    command.upgrade(config(database_url), "head")
