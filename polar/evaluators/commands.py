"""Commands that evaluators run in a runtime: bounded, logged, and never mistaken for a verdict when cut short.

What a command's end means is the evaluator's affair.
"""

from __future__ import annotations

from pathlib import Path

from polar.errors import EvaluatorError
from polar.evaluators.base import Case
from polar.runtimes.base import ExecResult, Limits, Runtime

CANNOT_RUN = frozenset({126, 127})
"""Exit codes with which a shell says that it could not run the command at all."""


def runtime_of(case: Case, evaluator: str) -> Runtime:
    """The runtime to judge in. Raises EvaluatorError if there is none any more."""
    if case.runtime is None:
        raise EvaluatorError(f"{evaluator} runs commands, but the session has no runtime any more", code="no_runtime")
    return case.runtime


def log_of(case: Case, what: str) -> Path:
    """Where the output of the command called `what` is kept, without suffix."""
    return case.logs / what.replace(" ", "_")


def run(case: Case, runtime: Runtime, command: str, *, what: str, seconds: float, cwd: str | None = None) -> ExecResult:
    """Run `command` to its own end. Raises EvaluatorError if it is stopped before."""
    case.logs.mkdir(parents=True, exist_ok=True)
    log = log_of(case, what)
    for suffix in (".stdout", ".stderr"):
        # An earlier attempt at this stage may have left its output, which must not be read as this one's.
        Path(f"{log}{suffix}").unlink(missing_ok=True)
    left = case.limits.left()
    limits = Limits(seconds if left is None else min(seconds, left), case.limits.cancelled, case.limits.clock)
    result = runtime.exec(command, limits=limits, env=case.env, cwd=cwd, log=log)
    if result.timed_out:
        raise EvaluatorError(f"the {what} {result.summary()}", code="evaluator_timeout")
    if result.exit_code is None:
        raise EvaluatorError(f"the {what} {result.summary()}", code="evaluator_stopped")
    return result


def output_of(case: Case, what: str, result: ExecResult) -> tuple[bytes, bytes]:
    """Both output streams as they came: the log is whole where what the result holds may be cut."""
    kept = {".stdout": result.stdout, ".stderr": result.stderr}
    files = {suffix: Path(f"{log_of(case, what)}{suffix}") for suffix in kept}
    found = [files[each].read_bytes() if files[each].exists() else kept[each].encode() for each in kept]
    return found[0], found[1]
