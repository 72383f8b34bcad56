"""The URL of a database, as the proxy's driver takes it."""

from __future__ import annotations

import pytest

from polar.proxy.database import plain


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql+psycopg://u:p%40@h:5/db", "postgresql://u:p%40@h:5/db"),
        ("postgresql://h/db?sslmode=require&connect_timeout=3", "postgresql://h/db?sslmode=require"),
        ("postgresql:///db?host=/run/pg&keepalives_idle=5", "postgresql:///db?host=%2Frun%2Fpg"),
    ],
)
def test_url(url: str, expected: str) -> None:
    """SQLAlchemy's name of its driver and what only libpq knows are left out; all else stays."""
    assert plain(url) == expected
