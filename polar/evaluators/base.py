"""An evaluator reaches a verdict on a session: from its trajectory, its runtime, or both.

A reward exists only if an evaluator ran to its end; one that cannot reach a verdict raises EvaluatorError
and never returns a made-up zero. Which traces get what reward is `rewards.py`'s affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from polar.runtimes.base import Limits, Runtime
from polar.spec import EvaluatorSpec, TaskRequest


def _anything(_: object) -> None:
    """Without a stage around it, an evaluator may read and call what its caller can."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an evaluator found. Rewards are finite numbers; None means: not judged."""

    outcome_reward: float | None
    trace_rewards: list[float | None] | None = None
    """One per trace, if given."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Test output, patch, judge's answer: kept and shown."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be judged."""

    task: TaskRequest
    session_id: str
    traces: list[dict[str, Any]]
    """Each: {"prompt_messages", "response_messages", "finish_reason", "metadata"}, in order."""
    agent_exit: dict[str, Any]
    runtime: Runtime | None
    """The agent's runtime, or a fresh one if the spec asked for it; None if neither exists any more."""
    env: Mapping[str, str]
    limits: Limits
    logs: Path
    agent_runtime: Runtime | None = None
    """Where the agent's work is, if `runtime` is a fresh one; None if `runtime` is the agent's."""
    check_source: Callable[[Path], None] = _anything
    """Whether a task may bring in this path of the node; asked before one is read. Raises PrepareError."""
    check_url: Callable[[str], None] = _anything
    """Whether a task may have this address called; asked before one is. Raises SpecError."""

    def final_text(self) -> str:
        """The last assistant text of the last trace that has any."""
        for trace in reversed(self.traces):
            for message in reversed(trace["response_messages"]):
                if message.get("role") == "assistant" and message.get("content"):
                    return str(message["content"])
        return ""


class Evaluator(ABC):
    """One way to judge; made anew for each session with the task's config."""

    name: ClassVar[str]
    NEEDS_RUNTIME: ClassVar[bool] = False
    """Runs commands; without a runtime it cannot reach a verdict."""

    def __init__(self, **config: Any) -> None:  # noqa: B027 - a member without settings may leave it as it is
        """Raises SpecError for a key it does not know or a value that cannot be; called at submit, too."""

    def check(self, spec: EvaluatorSpec) -> None:  # noqa: B027 - most members have nothing to add
        """Raises SpecError for what the rest of the evaluator's spec makes impossible; called at submit, too."""

    @abstractmethod
    def evaluate(self, case: Case) -> Verdict:
        """Raises EvaluatorError when no verdict can be reached."""
