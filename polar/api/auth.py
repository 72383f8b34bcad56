"""Who may call: the key of a request and its scopes.

A key travels as Bearer token, as X-API-Key, or as the password in the URL (`http://polar:KEY@host`): the
last lets a client that knows nothing of keys be used as it is.
"""

from __future__ import annotations

import uuid

from flask import Flask, current_app, g, request

from polar import keys
from polar.db import transaction
from polar.errors import AuthError

ADMIN_PATHS = ("/nodes", "/rollout/policy", "/rollout/pause", "/rollout/resume")
OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/openapi.json", "/docs", "/", "/admin"})
"""What tells nothing of the work; the last two only lead to the pages."""
PAGES = "admin"
"""The blueprint of the pages, which have a login of their own."""


class ForbiddenError(AuthError):
    code = "forbidden"
    http_status = 403


def sent_key() -> str | None:
    """The key of this request, wherever it travels."""
    authorization = request.authorization
    if authorization is not None:
        return authorization.token or authorization.password or authorization.username
    return request.headers.get("X-API-Key")


def scope_of(method: str, path: str) -> str:
    """Reading needs `read`; what touches everybody's work (nodes, the policy, the gate) `admin`; the rest `submit`."""
    if method in ("GET", "HEAD"):
        return "read"
    return "admin" if path.startswith(ADMIN_PATHS) else "submit"


def caller() -> uuid.UUID | None:
    """The id of this request's key; None where the API asks for no key."""
    found: uuid.UUID | None = g.get("key_id")
    return found


def register(app: Flask) -> None:
    """Check every request but those to OPEN_PATHS and to the pages."""

    @app.before_request
    def _check() -> None:
        if request.path in OPEN_PATHS or request.blueprint == PAGES or current_app.config["POLAR"].auth == "open":
            return
        key = sent_key()
        if not key:
            raise AuthError("send an API key: Authorization: Bearer KEY, or http://polar:KEY@host")
        with transaction(current_app.config["DATABASE"]) as db:
            found = keys.find(db, key)
        if found is None or not found.scopes:
            raise AuthError("this API key is unknown or revoked: make another at /admin/keys", code="unknown_key")
        needed = scope_of(request.method, request.path)
        if needed not in found.scopes:
            raise ForbiddenError(f"this API key lacks the scope {needed!r}: make one that has it at /admin/keys")
        g.key_id = found.id
