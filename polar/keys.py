"""Keys of the REST API and the pages: made, hashed, looked up. Proxy keys are sessions' own and not here."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from polar.models import ApiKey

SCOPES = ("submit", "read", "admin")
PREFIX = "polar-"


def hashed(key: str) -> bytes:
    """What is stored of a key: SHA-256. Keys have 256 random bits, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).digest()


def make(db: Session, name: str, scopes: Sequence[str] = SCOPES) -> str:
    """A new key with these scopes; the only moment at which it can be read."""
    key = PREFIX + secrets.token_urlsafe(32)
    db.add(ApiKey(name=name, key_hash=hashed(key), scopes=list(scopes)))
    return key


def ensure(db: Session, name: str, key: str, scopes: Sequence[str] = SCOPES) -> None:
    """Register a key that the caller keeps."""
    if db.scalar(select(ApiKey.id).where(ApiKey.key_hash == hashed(key))) is None:
        db.add(ApiKey(name=name, key_hash=hashed(key), scopes=list(scopes)))


def find(db: Session, key: str) -> ApiKey | None:
    """The row of a key; None if it is unknown or revoked."""
    return db.scalar(select(ApiKey).where(ApiKey.key_hash == hashed(key), ApiKey.revoked_at.is_(None)))


def scopes_of(db: Session, key: str) -> frozenset[str]:
    """What a key may do; nothing if it is unknown or revoked."""
    found = find(db, key)
    return frozenset(found.scopes if found else ())
