"""Which traces may train, with what reward and what weight: one function, one truth table.

docs/rewards.md holds the table in the words used here, and a test reads it row by row. Reaching a verdict is the
evaluators' affair, finding flags the builders'; nothing here reads a database.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from polar.errors import EvaluatorError
from polar.evaluators.base import Verdict

FINISHED_AGENTS = frozenset({"completed", "timed_out"})
"""Ends of an agent whose traces may train: what it did within its own budget counts as it stands."""
UNTRAINABLE = {
    "missing_prompt_ids": "the tokens it was conditioned on are not known",
    "missing_logprobs": "a sampled token has no log-probability",
    "non_finite_logprobs": "a log-probability is not finite",
    "sentinel_logprobs": "a log-probability is an engine's stand-in",
    "raw_logprobs": "its log-probabilities are not of the distribution that its tokens were drawn from",
    "ghost": "the harness never got this answer, so it has no part in the reward",
    "stale": "a trained token is more versions behind the policy than its bound allows",
}
"""Flags with which a trace cannot train, and why; the first that a trace has is named."""


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What of a trace bears on whether it may train."""

    fidelity: str
    """exact, drifted or unverified."""
    flags: tuple[str, ...]
    sampled_tokens: int
    """Tokens that carry the mask."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session came out."""

    agent: str | None
    """State of its agent_exit: completed, failed, timed_out, cancelled; None if the agent never ended."""
    trajectory: bool
    """Whether its completions could be put together."""
    session: str = "completed"
    """The state it ends in."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a trainer may do with one trace."""

    reward: float | None
    trainable: bool
    weight: float
    """1 / number of the session's trainable traces, so that a session counts once; 0 if not trainable."""
    rule: str
    """The row of the table that decided."""
    reason: str


def decide(
    ending: Ending,
    traces: Sequence[TraceFacts],
    *,
    verdict: Verdict | None,
    evaluator: str | None,
    strict: bool,
    builder: str,
) -> list[Decision]:
    """One decision for each trace, in order.

    `evaluator` is the one the task asks for, None if it asks for none; `verdict` is what it found, None if it
    did not get there. Raises EvaluatorError for a verdict that cannot be."""
    rewards = _rewards(verdict, len(traces), evaluator, builder)
    ended_badly = _session_rule(ending, evaluated=evaluator is None or verdict is not None)
    found: list[tuple[float | None, bool, str, str]] = []
    for facts, reward in zip(traces, rewards, strict=True):
        if ended_badly is not None:
            rule, reason = ended_badly
            # A verdict on a session that went on despite its agent is kept to be seen; one on a session that
            # failed would read as a result that it does not have.
            found.append((reward if rule == "agent_failed" else None, False, rule, reason))
        else:
            trainable, rule, reason = _trace_rule(facts, reward, evaluator=evaluator, strict=strict)
            found.append((reward, trainable, rule, reason))
    usable = sum(1 for _, trainable, _, _ in found if trainable)
    return [
        Decision(reward, trainable, 1 / usable if trainable else 0.0, rule, reason)
        for reward, trainable, rule, reason in found
    ]


def _session_rule(ending: Ending, *, evaluated: bool) -> tuple[str, str] | None:
    """Why no trace of the session may train, if so."""
    if ending.session != "completed":
        return "session_not_completed", f"the session ended as {ending.session}"
    if not ending.trajectory:
        return "no_trajectory", "its completions could not be put together"
    if not evaluated:
        return "not_evaluated", "the evaluator reached no verdict"
    if ending.agent not in FINISHED_AGENTS:
        return "agent_failed", f"the agent ended as {ending.agent}" if ending.agent else "the agent never ended"
    return None


def _trace_rule(
    facts: TraceFacts, reward: float | None, *, evaluator: str | None, strict: bool
) -> tuple[bool, str, str]:
    """Whether this trace of a usable session may train, by what rule, and why."""
    if facts.sampled_tokens == 0:
        return False, "nothing_sampled", "no token of it was sampled here"
    for flag, reason in UNTRAINABLE.items():
        if flag in facts.flags:
            return False, flag, reason
    if strict and facts.fidelity != "exact":
        return False, "quarantined", f"the task is strict and the trace is {facts.fidelity}"
    if evaluator is None:
        return True, "unevaluated", "the task asks for no evaluator; the trainer brings the reward"
    if reward is None:
        return False, "no_reward", "the verdict has no reward for this trace"
    return True, "trainable", "the evaluator's reward"


def _rewards(verdict: Verdict | None, traces: int, evaluator: str | None, builder: str) -> list[float | None]:
    """The verdict's reward for each trace: its own if the verdict lists them, else the outcome reward for all."""
    if verdict is None:
        return [None] * traces
    outcome = _checked(verdict.outcome_reward, "outcome_reward", evaluator)
    if verdict.trace_rewards is None:
        return [outcome] * traces
    if len(verdict.trace_rewards) != traces:
        raise EvaluatorError(
            f"{evaluator} gave {len(verdict.trace_rewards)} trace_rewards, but {builder} built {traces} traces; "
            "give one for each, or only an outcome_reward",
            code="trace_rewards_mismatch",
        )
    return [
        _checked(reward, f"trace_rewards[{number}]", evaluator) for number, reward in enumerate(verdict.trace_rewards)
    ]


def _checked(reward: object, place: str, evaluator: str | None) -> float | None:
    """A finite number or None; True is no reward of 1, it is an evaluator that returned the wrong thing."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise EvaluatorError(f"{evaluator} gave {place} {reward!r}; it must be a finite number", code="bad_reward")
    return float(reward)
