"""The rule of session_completed, whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polar.evaluators.base import Case
from polar.evaluators.session_completed import SessionCompleted

TRACE: dict[str, Any] = {"prompt_messages": [], "response_messages": [], "finish_reason": "stop", "metadata": {}}


@pytest.mark.parametrize(
    ("agent", "traces", "reward"),
    [
        ("completed", [TRACE], 1.0),
        ("completed", [], 0.0),
        ("failed", [TRACE], 0.0),
        ("timed_out", [TRACE], 0.0),
    ],
)
def test_rule(case: Callable[..., Case], agent: str, traces: list[dict[str, Any]], reward: float) -> None:
    """Only an agent that came to its own end and left a trace gets 1.0; no runtime is asked for."""
    judged = case(runtime=None, agent_exit={"state": agent}, traces=traces)
    assert SessionCompleted().evaluate(judged).outcome_reward == reward
