"""What every page shares: the blueprint, its headers and errors, the transaction it reads in, and its parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import Any

from flask import Blueprint, Flask, Response, current_app, g, render_template, request, url_for
from sqlalchemy.exc import DataError, OperationalError
from sqlalchemy.orm import Session
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as AnyResponse

import templates
from polar import __version__
from polar.db import transaction
from polar.errors import NotFoundError, PolarError
from polar.log import line
from polar.remedies import REMEDIES

logger = logging.getLogger(__name__)
PREFIX = "/admin"
CSP = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
blueprint = Blueprint(
    "admin",
    __name__,
    url_prefix=PREFIX,
    template_folder=str(Path(str(templates.__file__)).parent),
    static_folder="static",
)
View = Callable[..., Any]


def page(template: str) -> Callable[[View], View]:
    """A view that returns the values of this template, or an answer of its own."""

    def wrap(view: View) -> View:
        @wraps(view)
        def shown(*args: Any, **kwargs: Any) -> Any:
            values = view(*args, **kwargs)
            return render_template(template, **values) if isinstance(values, dict) else values

        return shown

    return wrap


@contextmanager
def database() -> Iterator[Session]:
    """The transaction of a page."""
    with transaction(current_app.config["DATABASE"]) as db:
        yield db


def whole(name: str, default: int, low: int = 0, high: int = 2**31 - 1) -> int:
    """A whole number of the query, moved into its bounds; the default for what is none."""
    try:
        return min(max(int(request.args.get(name, default)), low), high)
    except ValueError:
        return default


def chosen(name: str, allowed: Any, default: str = "") -> str:
    """A word of the query; the default for one that is not allowed."""
    value = request.args.get(name, default)
    return value if value in allowed else default


@blueprint.app_template_global()
def link_with(**changes: Any) -> str:
    """This page with some parameters of its query changed; None takes one out."""
    values = {**request.args.to_dict(), **(request.view_args or {}), **changes}
    return url_for(request.endpoint or "admin.overview", **{k: v for k, v in values.items() if v not in (None, "")})


def prepare(app: Flask) -> None:
    """What is the app's and not the blueprint's: white space in templates."""
    app.jinja_env.trim_blocks = True
    app.jinja_env.lstrip_blocks = True


@blueprint.before_request
def _refuse_nul() -> None:
    # Postgres holds no NUL in a text, so nothing with one can be found.
    texts = [*request.args.values(), *map(str, (request.view_args or {}).values())]
    if any("\0" in each for each in texts):
        raise NotFoundError("an address with a NUL character names nothing")


@blueprint.after_request
def _headers(response: AnyResponse) -> AnyResponse:
    response.headers.setdefault("Content-Security-Policy", CSP)
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Referrer-Policy", "same-origin")
    response.headers.setdefault("Cross-Origin-Opener-Policy", "same-origin")
    if request.endpoint != "admin.static":
        response.headers.setdefault("Cache-Control", "no-store")
    return response


@blueprint.app_context_processor
def _shared() -> dict[str, Any]:
    return {"version": __version__, "who": g.get("who"), "gate": g.get("gate"), "remedies": REMEDIES}


@blueprint.errorhandler(PolarError)
def _polar(error: PolarError) -> tuple[str, int]:
    return problem(error.http_status, error.message)


@blueprint.errorhandler(HTTPException)
def _http(error: HTTPException) -> AnyResponse | tuple[str, int]:
    if isinstance(error.response, AnyResponse):
        return error.response
    return problem(error.code or 500, error.description or "")


@blueprint.errorhandler(DataError)
def _unreadable(error: DataError) -> tuple[str, int]:
    return problem(404, "this address names nothing that the database can hold")


@blueprint.errorhandler(OperationalError)
def _away(error: OperationalError) -> tuple[str, int]:
    logger.error(line("database away", path=request.path, error=str(error.orig).splitlines()[0]))
    return problem(503, "the database does not answer; this page tries again when you reload it")


@blueprint.errorhandler(Exception)
def _bug(error: Exception) -> tuple[str, int]:
    logger.exception(line("page broke", method=request.method, path=request.path))
    return problem(500, "this is a bug of Polar's; the API's log says more")


def problem(status: int, message: str) -> tuple[str, int]:
    """An error as a page, or as a line where a fragment was asked for."""
    template = "admin/_problem.html" if request.headers.get("HX-Request") else "admin/problem.html"
    return render_template(template, code=status, title=HTTPStatus(status).phrase, message=message), status


@blueprint.get("/<path:rest>")
def nowhere(rest: str) -> Response:
    """Whatever has no page."""
    raise NotFoundError(f"there is no page {PREFIX}/{rest}")


@blueprint.get("/help")
@page("admin/help.html")
def help_page() -> dict[str, Any]:
    """The keyboard, the words and the colours, for who has no JavaScript and for who asks."""
    return {}
