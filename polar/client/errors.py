"""Every error of the client, drawn before it is defined. Each says in its text what was asked and what to do next.

ClientError
├── UnreachableError     no answer, after all retries
├── ProtocolError        an answer that no Polar gives: another server, or a proxy between
└── ApiError             Polar answered with a problem document
    ├── InvalidError         400, 422: a field is wrong; `errors` names each
    ├── AuthError            401, 403: no key, a wrong one, or one without the scope
    ├── NotFoundError        404: no such task or session
    ├── ConflictError        409: it already is
    ├── BusyError            429: this key has as much open as it may have
    ├── NotHoldingError      504 of a pause: the gate is closed, and not every proxy holds yet
    └── ServerError          any other 5xx
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx


class ClientError(Exception):
    """The root. `str(error)` is fit for a user."""


class UnreachableError(ClientError):
    """Polar did not answer. `__cause__` is the transport's own error."""


class ProtocolError(ClientError):
    """Something answered that is not Polar, or not whole."""


class ApiError(ClientError):
    """A problem document (RFC 9457)."""

    def __init__(self, status: int, problem: Mapping[str, Any], asked: str, retry_after: str | None = None) -> None:
        self.status = status
        """The HTTP status code."""
        self.problem = dict(problem)
        """The whole document."""
        self.asked = asked
        """Method and path."""
        self.retry_after = retry_after
        """Seconds after which the server wants to be asked again, as it wrote them."""
        super().__init__(_sentence(status, self.problem, asked))

    @property
    def code(self) -> str:
        """Polar's name for what is wrong; for programs, and stable."""
        return str(self.problem.get("code", ""))

    @property
    def detail(self) -> str:
        """What is wrong, in words."""
        return str(self.problem.get("detail", ""))

    @property
    def errors(self) -> list[dict[str, str]]:
        """Each wrong field with its reason."""
        return list(self.problem.get("errors") or [])


class InvalidError(ApiError):
    """A field is wrong, or the body cannot be read."""


class AuthError(ApiError):
    """No key, a wrong one, or one without the scope that this needs."""


class NotFoundError(ApiError):
    """No such task, session or path."""


class ConflictError(ApiError):
    """What was asked for already is, or something else came first."""


class BusyError(ApiError):
    """The key has as much open as it may have; `problem` has `limit`, `open` and `asked`."""


class NotHoldingError(ApiError):
    """A pause ran out of time: the gate stays closed, and `problem["not_holding"]` names the proxies."""


class ServerError(ApiError):
    """Polar, its database or something between failed."""


BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidError,
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidError,
    422: InvalidError,
    429: BusyError,
}


def error_of(response: httpx.Response) -> ApiError:
    """The error that an answer stands for; its body must have been read."""
    asked = f"{response.request.method} {response.request.url.path}"
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {"detail": response.text[:200].strip() or response.reason_phrase}
    if body.get("code") == "not_holding":
        return NotHoldingError(response.status_code, body, asked)
    kind = BY_STATUS.get(response.status_code, ServerError)
    return kind(response.status_code, body, asked, response.headers.get("Retry-After"))


def _sentence(status: int, problem: Mapping[str, Any], asked: str) -> str:
    code = f" {problem['code']}" if problem.get("code") else ""
    lines = [f"{status}{code}: {problem.get('detail', '')} ({asked})"]
    errors = problem.get("errors") or []
    if len(errors) > 1:
        lines += [f"  {error.get('field')}: {error.get('reason')}" for error in errors]
    if status == 401:
        lines.append("  give the client a key; `polar up` prints one and keeps it in its home folder")
    return "\n".join(lines)
