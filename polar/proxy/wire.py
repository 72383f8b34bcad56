"""What an error is on a harness's wire: a status and a code, which the dialect then puts into its own shape.

5xx says: try again. 400 and 403 say: do not. Harnesses retry by these alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from polar.dialects.base import BadRequest
from polar.errors import AuthError, BudgetError, EngineError, HarnessError, LostLeaseError, NodeError
from polar.log import line
from polar.proxy.database import FAILED

logger = logging.getLogger(__name__)

RETRY_AFTER = 2
"""Seconds. The proxy itself has tried for longer by then."""
LASTING = frozenset({"no_token_ids", "engine_altered_prompt", "engine_setup", "engine_unfit"})
"""Faults of how a lane is set up: asking again changes nothing."""
AWAY = frozenset({"engine_down", "engine_aborted"})


@dataclass(frozen=True, slots=True)
class WireError:
    """An answer that is not one."""

    status: int
    code: str
    message: str
    field: str | None = None

    def headers(self) -> dict[str, str]:
        """When to come back, for errors that may pass."""
        return {"retry-after": str(RETRY_AFTER)} if self.status in (429, 503) else {}


def wire_error(error: BaseException) -> WireError:
    """How a harness is told. What nobody foresaw is logged here and told without its inside."""
    if isinstance(error, BadRequest):
        return WireError(error.status, error.code or "invalid_request", error.message, error.field)
    if isinstance(error, AuthError):
        return WireError(401, "invalid_api_key", error.message)
    if isinstance(error, LostLeaseError):
        return WireError(401, "session_ended", error.message)
    if isinstance(error, BudgetError):
        return WireError(403, error.code, error.message)
    if isinstance(error, EngineError):
        status = _engine_status(error)
        return WireError(status, "rate_limit_exceeded" if status == 429 else error.code, error.message)
    if isinstance(error, HarnessError):
        return WireError(400, error.code, error.message)
    if isinstance(error, NodeError):
        return WireError(503, error.code, error.message)
    if isinstance(error, FAILED):
        logger.error(line("call failed", error=type(error).__name__, cause=_first_line(error)))
        return WireError(503, "database_error", "the proxy's database does not answer; try again")
    logger.error(line("call failed", error=type(error).__name__, cause=_first_line(error)), exc_info=_debug(error))
    return WireError(500, "internal_error", "the proxy failed on this request; its log has the cause")


def _engine_status(error: EngineError) -> int:
    if error.status == 429:
        return 429
    if error.code == "context_length_exceeded" or (error.code == "engine_refused" and (error.status or 0) < 500):
        return 400
    if error.code in LASTING:
        return 400
    if error.code == "engine_timeout":
        return 504
    return 503 if error.retryable or error.code in AWAY else 502


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _debug(error: BaseException) -> BaseException | None:
    return error if logger.isEnabledFor(logging.DEBUG) else None
