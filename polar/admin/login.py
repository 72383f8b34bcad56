"""Who is looking: an API key, given once in a form, stands in a signed cookie as its id; its row says what it may.

The key itself is in no cookie, and a key that is revoked ends its logins with the next request. The cookie is HttpOnly,
SameSite=Lax and goes to /admin alone, so that it opens nothing of the REST API. What changes something is a POST with a
token that only our own pages have.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from flask import Flask, Response, current_app, flash, g, jsonify, redirect, request, session, url_for
from flask.sessions import SecureCookieSessionInterface
from itsdangerous import BadData, URLSafeTimedSerializer
from sqlalchemy import select
from werkzeug.wrappers import Response as AnyResponse

from polar import keys
from polar.admin.page import PREFIX, View, blueprint, database, page
from polar.api.auth import ForbiddenError, sent_key
from polar.errors import AuthError
from polar.models import ApiKey, Policy
from polar.settings import Settings

TICKET_SECONDS = 3600
"""How long the link that `polar up` and `polar dashboard` print logs in."""
LOGIN_DAYS = 7
OPEN_ENDPOINTS = frozenset({"admin.static", "admin.login", "admin.enter", "admin.ticket", "admin.theme"})
THEMES = ("auto", "light", "dark")


@dataclass(frozen=True, slots=True)
class Who:
    """Who asks for this page."""

    name: str
    scopes: frozenset[str]
    key_id: uuid.UUID | None = None

    def may(self, scope: str) -> bool:
        """Whether it may do what needs this scope."""
        return scope in self.scopes


class Cookies(SecureCookieSessionInterface):
    """The login's cookie: over TLS, and only over TLS, where the page came that way."""

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure


def prepare(app: Flask) -> None:
    """The cookie's settings and its signing key."""
    settings: Settings = app.config["POLAR"]
    app.secret_key = signing_key(settings)
    app.session_interface = Cookies()
    app.config.update(
        SESSION_COOKIE_NAME="polar_pages",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_PATH=PREFIX,
        PERMANENT_SESSION_LIFETIME=timedelta(days=LOGIN_DAYS),
    )


def signing_key(settings: Settings) -> bytes:
    """What signs cookies and links: of the settings, else of this process alone."""
    secret = settings.pages_secret or secrets.token_hex(32)
    return hmac.new(secret.encode(), b"polar pages", hashlib.sha256).digest()


def needs(scope: str) -> Callable[[View], View]:
    """The scope that a view's POST needs; without this mark it is `admin`."""

    def mark(view: View) -> View:
        view.scope = scope  # type: ignore[attr-defined]
        return view

    return mark


@blueprint.before_request
def _check() -> AnyResponse | None:
    g.who = g.gate = None
    if request.endpoint == "admin.static":
        return None
    with database() as db:
        g.who = _who()
        if request.endpoint != "admin.ticket":
            g.gate = db.scalar(select(Policy.gate)) if g.who else None
    view = current_app.view_functions.get(request.endpoint or "")
    posting = request.method not in ("GET", "HEAD")
    if posting and request.endpoint != "admin.ticket":
        _refuse_forged(token=not getattr(view, "own_forms", False))
    if request.endpoint in OPEN_ENDPOINTS:
        return None
    if g.who is None:
        return _to_login()
    needed = getattr(view, "scope", "admin") if posting else getattr(view, "reading_scope", "read")
    if not g.who.may(needed):
        raise ForbiddenError(f"this key lacks the scope {needed!r}; log in with one that has it")
    return None


def _who() -> Who | None:
    if current_app.config["POLAR"].auth == "open":
        return Who("anybody", frozenset(keys.SCOPES))
    try:
        key_id = uuid.UUID(session.get("key", ""))
    except ValueError:
        return None
    with database() as db:
        found = db.scalar(select(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)))
    return Who(found.name, frozenset(found.scopes), found.id) if found else None


def _to_login() -> AnyResponse:
    login = url_for("admin.login", next=request.full_path.rstrip("?"))
    if request.headers.get("HX-Request"):
        return Response("", 401, headers={"HX-Redirect": url_for("admin.login")})
    return redirect(login, 303)


# ── forged requests ────────────────────────────────────────────────────────────────────────────────


def csrf() -> str:
    """The token that this browser's forms carry."""
    token: str = session.setdefault("csrf", secrets.token_urlsafe(24))
    return token


def _refuse_forged(*, token: bool) -> None:
    site = request.headers.get("Sec-Fetch-Site")
    if site is None and not token:
        # A browser that does not say so names at least where the form stands.
        site = "same-origin" if request.headers.get("Origin", "") + "/" == request.host_url else "unknown"
    if site not in (None, "same-origin", "none"):
        raise ForbiddenError("this form was sent from another site, and nothing was done")
    sent, own = request.form.get("csrf", "") if token else "", session.get("csrf", "")
    if token and (not own or not hmac.compare_digest(sent.encode(), own.encode())):
        raise ForbiddenError("this form is too old or not from these pages, and nothing was done; go back and reload")


@blueprint.app_context_processor
def _forms() -> dict[str, Any]:
    theme = request.cookies.get("polar_theme", "auto")
    return {"csrf": csrf, "theme": theme if theme in THEMES else "auto"}


# ── coming and going ───────────────────────────────────────────────────────────────────────────────


@blueprint.route("/login", methods=["GET", "POST"])
@page("admin/login.html")
def login() -> dict[str, Any] | AnyResponse:
    """The form that takes a key with the scope read, and what becomes of it."""
    following = request.values.get("next", "")
    if request.method == "GET":
        return {"next": following} if g.who is None else redirect(local(following), 303)
    with database() as db:
        found = keys.find(db, request.form.get("key", "").strip())
    if found is None or "read" not in found.scopes:
        why = "This key is unknown or revoked." if found is None else "This key lacks the scope “read”."
        return {"next": following, "error": why}
    _remember(found.id)
    return redirect(local(following), 303)


def _remember(key_id: uuid.UUID) -> None:
    # A token that stood there before the login might be known to somebody else.
    session.clear()
    session.permanent = True
    session["key"] = str(key_id)
    csrf()


@blueprint.post("/logout")
@needs("read")
def logout() -> AnyResponse:
    """Forget this browser."""
    session.clear()
    flash("You are logged out.")
    return redirect(url_for("admin.login"), 303)


def _tickets() -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(current_app.secret_key or b"", salt="polar-ticket")


@blueprint.post("/ticket")
def ticket() -> Response:
    """A link that logs in, for the command line: asked for with an API key in the header, never with a cookie."""
    if current_app.config["POLAR"].auth == "open":
        return jsonify({"path": url_for("admin.overview"), "seconds": None})
    with database() as db:
        found = keys.find(db, sent_key() or "")
    if found is None or "read" not in found.scopes:
        raise AuthError("a login link needs an API key with the scope 'read'")
    made = _tickets().dumps(str(found.id))
    return jsonify({"path": url_for("admin.enter", ticket=made), "seconds": TICKET_SECONDS})


@blueprint.get("/enter/<ticket>")
def enter(ticket: str) -> AnyResponse:
    """Log in by such a link."""
    try:
        key_id = uuid.UUID(_tickets().loads(ticket, max_age=TICKET_SECONDS))
    except (BadData, ValueError):
        flash("This link is too old. Run `polar dashboard` for a new one, or give an API key here.")
        return redirect(url_for("admin.login"), 303)
    _remember(key_id)
    return redirect(url_for("admin.overview"), 303)


@blueprint.post("/theme")
def theme() -> AnyResponse:
    """Light, dark, or as the system says: kept in a cookie of this browser."""
    wanted = request.form.get("theme", "auto")
    answer = redirect(local(request.form.get("back", "")), 303)
    value = wanted if wanted in THEMES else "auto"
    answer.set_cookie(
        "polar_theme", value, max_age=365 * 86400, path=PREFIX, samesite="Lax", httponly=True, secure=request.is_secure
    )
    return answer


def local(path: str) -> str:
    """A page of ours, whatever was asked for: a login never leads to another site."""
    fine = path.startswith(PREFIX + "/") and "\\" not in path and "//" not in path and path.isprintable()
    return path if fine else url_for("admin.overview")
