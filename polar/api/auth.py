"""Who may call: the key of a request and its scopes.

A key travels as Bearer token, as X-API-Key, or as the password in the URL (`http://polar:KEY@host`): the
last lets a client that knows nothing of keys be used as it is.
"""

from __future__ import annotations

from flask import Flask, current_app, request

from polar import keys
from polar.db import transaction
from polar.errors import AuthError

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/openapi.json"})


class ForbiddenError(AuthError):
    code = "forbidden"
    http_status = 403


def sent_key() -> str | None:
    """The key of this request, wherever it travels."""
    authorization = request.authorization
    if authorization is not None:
        return authorization.token or authorization.password or authorization.username
    return request.headers.get("X-API-Key")


def needed_scope() -> str:
    """Reading needs `read`, nodes and lanes need `admin`, the rest `submit`."""
    if request.method in ("GET", "HEAD"):
        return "read"
    return "admin" if request.path.startswith("/nodes") else "submit"


def register(app: Flask) -> None:
    """Check every request but those to OPEN_PATHS."""

    @app.before_request
    def _check() -> None:
        if request.path in OPEN_PATHS or current_app.config["POLAR"].auth == "open":
            return
        key = sent_key()
        if not key:
            raise AuthError("send an API key: Authorization: Bearer KEY, or http://polar:KEY@host")
        with transaction(current_app.config["DATABASE"]) as db:
            scopes = keys.scopes_of(db, key)
        if not scopes:
            raise AuthError("this API key is unknown or revoked", code="unknown_key")
        if needed_scope() not in scopes:
            raise ForbiddenError(f"this API key lacks the scope {needed_scope()!r}")
