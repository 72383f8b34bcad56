"""API keys: which there are, making one, which is shown once, and revoking one. Only hashes are kept."""

from __future__ import annotations

import uuid
from typing import Any

from flask import flash, g, redirect, request, url_for
from sqlalchemy import select
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from polar import keys
from polar.admin.page import View, blueprint, database, page
from polar.errors import NotFoundError
from polar.models import ApiKey, now

LONGEST_NAME = 100


def for_admins(view: View) -> View:
    """A page that only a key with the scope admin sees."""
    view.reading_scope = "admin"  # type: ignore[attr-defined]
    return view


@blueprint.route("/keys", methods=["GET", "POST"], endpoint="keys")
@for_admins
@page("admin/keys.html")
def api_keys() -> dict[str, Any]:
    """The list; a POST makes one, and its answer is the only place where it is ever shown."""
    made, error, name = None, None, ""
    scopes: list[str] = ["submit", "read"]
    with database() as db:
        if request.method == "POST":
            name = request.form.get("name", "").replace("\0", "").strip()
            scopes = [scope for scope in keys.SCOPES if scope in request.form.getlist("scopes")]
            error = _wrong(name, scopes)
            made = None if error else keys.make(db, name, scopes)
            db.flush()
        rows = list(db.scalars(select(ApiKey).order_by(ApiKey.revoked_at.is_not(None), ApiKey.created_at.desc())))
    return {"rows": rows, "made": made, "error": error, "name": name, "scopes": scopes, "all_scopes": keys.SCOPES}


def _wrong(name: str, scopes: list[str]) -> str | None:
    if not name or len(name) > LONGEST_NAME:
        return f"Give the key a name of at most {LONGEST_NAME} characters, such as who or what will use it."
    return None if scopes else "Choose at least one scope: a key without any can do nothing."


@blueprint.route("/keys/<uuid:key_id>/revoke", methods=["GET", "POST"])
@for_admins
@page("admin/confirm.html")
def revoke(key_id: uuid.UUID) -> dict[str, Any] | Response:
    """Ask, then let a key end: its next request is refused, and so is every login with it."""
    back = url_for("admin.keys")
    with database() as db:
        row = _found(db, key_id)
        if request.method == "POST":
            row.revoked_at = row.revoked_at or now()
            flash(f"Key “{row.name}” is revoked.")
            return redirect(back, 303)
    own = " It is the key you are logged in with: you will be logged out." if g.who.key_id == key_id else ""
    return {
        "title": f"Revoke key “{row.name}”?",
        "says": f"Whatever uses it is refused from now on, and it cannot be brought back.{own}",
        "does": "Revoke the key",
        "back": back,
        "crumbs": [("API keys", back)],
    }


def _found(db: Session, key_id: uuid.UUID) -> ApiKey:
    row = db.get(ApiKey, key_id)
    if row is None:
        raise NotFoundError("no such key")
    return row
