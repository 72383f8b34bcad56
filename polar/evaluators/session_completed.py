"""Reward 1.0 if the agent came to its own end and left a trace, else 0.0: for plumbing, and for distillation.

Looks at nothing that the agent did.
"""

from __future__ import annotations

from typing import Any, ClassVar

from polar.evaluators.base import Case, Evaluator, Verdict
from polar.evaluators.config import NoConfig, read_config


class SessionCompleted(Evaluator):
    """An agent that failed or ran out of time gets 0.0."""

    name: ClassVar[str] = "session_completed"

    def __init__(self, **config: Any) -> None:
        read_config(NoConfig, config)

    def evaluate(self, case: Case) -> Verdict:
        agent = case.agent_exit.get("state")
        completed = agent == "completed" and bool(case.traces)
        return Verdict(1.0 if completed else 0.0, evidence={"agent": agent, "traces": len(case.traces)})
