"""Every error Polar names, drawn before it is defined.

    PolarError
    ├── SpecError           the trainer asked for something that cannot be           blame: trainer
    ├── ConflictError       the trainer asked for something that already is          blame: trainer
    ├── NotFoundError       the trainer asked for something that is not              blame: trainer
    ├── LimitError          the trainer has as much open as its key may have         blame: trainer
    ├── LostLeaseError      another worker moved this session on; stop, say nothing  blame: none
    └── SessionError        a session ends, or is tried again, because of this
        ├── NodeError           this machine: disk, database, a worker that died     blame: node
        ├── RuntimeFault        the sandbox did not start, or broke                  blame: runtime
        ├── PrepareError        a prepare action of the task failed                  blame: trainer
        ├── HarnessError        the agent program failed or made no model call       blame: harness
        ├── EngineError         the inference server failed or broke its contract    blame: engine
        ├── BuilderError        completions could not be put together                blame: node
        ├── EvaluatorError      the verdict could not be reached                     blame: evaluator
        └── BudgetError         the session's time, turns or tokens ran out          blame: budget

A session's failure is shown as stage, blame, code and one sentence. `code` is for programs and never
changes; the sentence is for people and says what to do next. Only errors with `retryable` set may move
a session back to the queue. How an error looks on a harness's wire is the dialect's affair.
"""

from __future__ import annotations

from typing import Any


class PolarError(Exception):
    """The root. `str(error)` is one sentence fit for a user."""

    code: str = "polar_error"
    http_status: int = 500

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code


class SpecError(PolarError):
    """A task, topology or setting that cannot be. `errors` lists (field path, reason) pairs."""

    code = "invalid_spec"
    http_status = 422

    def __init__(self, message: str, *, errors: list[tuple[str, str]] | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.errors = errors or []

    @classmethod
    def at(cls, field: str, reason: str) -> SpecError:
        """One wrong field."""
        return cls(f"{field}: {reason}", errors=[(field, reason)])


class ConflictError(PolarError):
    """The thing exists already, or its state forbids this."""

    code = "conflict"
    http_status = 409


class NotFoundError(PolarError):
    """No such task, session, node or key."""

    code = "not_found"
    http_status = 404


class LimitError(PolarError):
    """As much is open as may be; it can be asked again after `retry_after` seconds. `detail` has the figures."""

    code = "too_many_open"
    http_status = 429
    retry_after = 5

    def __init__(self, message: str, *, code: str | None = None, detail: dict[str, Any] | None = None) -> None:
        super().__init__(message, code=code)
        self.detail = detail or {}


class AuthError(PolarError):
    """No key, a wrong key, or a key without the scope."""

    code = "unauthorized"
    http_status = 401


class LostLeaseError(PolarError):
    """A guarded move matched no row: this worker no longer holds the session and must not write."""

    code = "lost_lease"


class SessionError(PolarError):
    """A session ends, or is tried again, because of this."""

    blame: str = "node"
    retryable: bool = False
    code = "session_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, code=code)
        if retryable is not None:
            self.retryable = retryable
        self.detail = detail or {}


class NodeError(SessionError):
    blame = "node"
    retryable = True
    code = "node_error"
    http_status = 503


class RuntimeFault(SessionError):
    blame = "runtime"
    retryable = True
    code = "runtime_error"


class PrepareError(SessionError):
    blame = "trainer"
    code = "prepare_failed"


class HarnessError(SessionError):
    blame = "harness"
    code = "harness_error"


class EngineError(SessionError):
    """`status` is what the engine answered, when it answered."""

    blame = "engine"
    code = "engine_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool | None = None,
        detail: dict[str, Any] | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message, code=code, retryable=retryable, detail=detail)
        self.status = status


class BuilderError(SessionError):
    blame = "node"
    code = "builder_error"


class EvaluatorError(SessionError):
    blame = "evaluator"
    code = "evaluator_error"


class BudgetError(SessionError):
    blame = "budget"
    code = "budget_exhausted"
