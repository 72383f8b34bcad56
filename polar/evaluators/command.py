"""Any command judges: by its exit code, by the last line that it prints, or by a file that it writes.

It runs with the agent's rights in the runtime it is given. A reward file that lies there already is removed first, and
what the command leaves running is ended before the file is read; keeping the tests themselves from the agent is the
task's affair (`refresh_runtime`, and files that only `eval_prepare` uploads).
"""

from __future__ import annotations

import math
import posixpath
import shlex
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from polar.errors import EvaluatorError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.evaluators.commands import CANNOT_RUN, run, runtime_of
from polar.evaluators.config import Seconds, Text, read_config
from polar.runtimes.base import ExecResult, Runtime
from polar.spec import Spec

TAIL = 8000
"""Characters kept of each output stream as evidence."""


class CommandConfig(Spec):
    """What to run and where the reward is found."""

    command: Text
    """Runs in a shell."""
    cwd: str | None = None
    """None: the runtime's workdir."""
    timeout_seconds: Seconds = 300.0
    """A command that takes longer leaves no verdict."""
    reward_from: Literal["exit_code", "stdout", "file"] = "exit_code"
    """`stdout`: the last line that is not empty is the number."""
    reward_file: Text | None = None
    """Holds one number; relative to where the command runs."""
    success_reward: float = 1.0
    """For exit code 0."""
    failure_reward: float = 0.0
    """For any other exit code of the command's own."""

    @model_validator(mode="after")
    def _file_where_used(self) -> Self:
        if (self.reward_from == "file") != (self.reward_file is not None):
            raise ValueError("reward_file: goes with reward_from 'file', and only there")
        return self


class Command(Evaluator):
    """One command, one number."""

    name: ClassVar[str] = "command"
    NEEDS_RUNTIME: ClassVar[bool] = True

    def __init__(self, **config: Any) -> None:
        self.config = read_config(CommandConfig, config)

    def evaluate(self, case: Case) -> Verdict:
        runtime, config = runtime_of(case, self.name), self.config
        if config.reward_from == "file":
            self._forget_reward(case, runtime)
        result = run(
            case,
            runtime,
            config.command,
            what="evaluator command",
            seconds=config.timeout_seconds,
            cwd=config.cwd,
        )
        evidence = {
            "command": config.command,
            "exit_code": result.exit_code,
            "stdout": result.stdout[-TAIL:],
            "stderr": result.stderr[-TAIL:],
        }
        try:
            return Verdict(self._reward(case, runtime, result), evidence=evidence)
        except EvaluatorError as error:
            error.detail = evidence
            raise

    @property
    def _reward_place(self) -> str:
        return posixpath.join(self.config.cwd or "", self.config.reward_file or "")

    def _forget_reward(self, case: Case, runtime: Runtime) -> None:
        """What lies there before the command ran is the agent's word."""
        command = f"rm -rf -- {shlex.quote(self._reward_place)}"
        found = run(case, runtime, command, what="old reward", seconds=self.config.timeout_seconds)
        if not found.ok:
            raise EvaluatorError(f"an old reward file cannot be removed: rm {found.summary()}", code="old_reward_file")

    def _reward(self, case: Case, runtime: Runtime, result: ExecResult) -> float:
        if result.exit_code in CANNOT_RUN:
            raise EvaluatorError(
                f"the command itself could not run, which says nothing of the session: it {result.summary()}",
                code="command_not_run",
            )
        if self.config.reward_from == "exit_code":
            return self.config.success_reward if result.ok else self.config.failure_reward
        if not result.ok:
            # What a command that broke printed or left behind is no verdict; one that means to give a low
            # reward says so and exits with 0.
            raise EvaluatorError(
                f"the command must exit with 0 where its reward is read from {self.config.reward_from}; "
                f"it {result.summary()}",
                code="command_failed",
            )
        if self.config.reward_from == "stdout":
            lines = result.stdout.strip().splitlines()
            return _number(lines[-1] if lines else "", "the last line printed")
        return _number(self._read_file(case, runtime), "the reward file")

    def _read_file(self, case: Case, runtime: Runtime) -> str:
        runtime.kill_all()
        source = posixpath.join(runtime.workdir, self._reward_place)
        target = case.logs / "reward_file"
        target.unlink(missing_ok=True)
        try:
            runtime.download(source, target)
        except FileNotFoundError:
            raise EvaluatorError(f"the command wrote no {source}", code="no_reward_file") from None
        return target.read_text(errors="replace")


def _number(text: str, place: str) -> float:
    try:
        reward = float(text.strip())
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise EvaluatorError(f"{place} is not a finite number: {text.strip()[:200]!r}", code="bad_reward")
    return reward
