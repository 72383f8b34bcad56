"""Errors of the REST API: RFC 9457 problem documents that name the field. No traceback leaves this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from flask import Flask, Response, request
from sqlalchemy.exc import DataError, OperationalError
from werkzeug.exceptions import HTTPException

from polar.errors import LimitError, PolarError, SpecError
from polar.log import line

logger = logging.getLogger(__name__)


def problem(
    status: int,
    code: str,
    detail: str,
    errors: list[tuple[str, str]] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Response:
    """One problem document. `detail` is repeated where clients of the original look for it; `more` stands beside."""
    body: dict[str, Any] = {
        **(more or {}),
        "type": f"urn:polar:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
    }
    if errors:
        body["errors"] = [{"field": field, "reason": reason} for field, reason in errors]
    response = Response(orjson.dumps(body), status, mimetype="application/problem+json")
    if status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def register(app: Flask) -> None:
    """Answer every error of the app in this form."""

    @app.errorhandler(PolarError)
    def _polar(error: PolarError) -> Response:
        errors = error.errors if isinstance(error, SpecError) else None
        if not isinstance(error, LimitError):
            return problem(error.http_status, error.code, error.message, errors)
        response = problem(error.http_status, error.code, error.message, more=error.detail)
        response.headers["Retry-After"] = str(error.retry_after)
        return response

    @app.errorhandler(HTTPException)
    def _http(error: HTTPException) -> Response:
        status = error.code or 500
        if status == HTTPStatus.NOT_FOUND:
            detail = f"there is no {request.path}; the API's paths are listed at /docs"
        elif status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            most = app.config["MAX_CONTENT_LENGTH"] >> 20
            detail = f"the body is larger than {most} MiB: send less, or raise POLAR_MAX_BODY_MB"
        else:
            detail = error.description or HTTPStatus(status).phrase
        return problem(status, HTTPStatus(status).phrase.lower().replace(" ", "_"), detail)

    @app.errorhandler(DataError)
    def _unstorable(error: DataError) -> Response:
        reason = str(error.orig).splitlines()[0]
        return problem(
            422, "unstorable", f"a value that the database cannot hold: {reason}; take it out and send the rest again"
        )

    @app.errorhandler(OperationalError)
    def _database(error: OperationalError) -> Response:
        logger.error(line("database away", path=request.path, error=str(error.orig).splitlines()[0]))
        return problem(503, "database_unavailable", "the database does not answer; try again in a moment")

    @app.errorhandler(Exception)
    def _bug(error: Exception) -> Response:
        logger.exception(line("request broke", method=request.method, path=request.path))
        return problem(
            500, "internal", "this is a bug of Polar's; the API's log has the traceback: report it with that"
        )
