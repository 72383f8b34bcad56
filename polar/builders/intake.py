"""Where every completion goes: into a trace, or out with a word for why. Joining completions is links.py's affair."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from polar.builders.base import Call, Trace
from polar.errors import BuilderError

AUXILIARY = "auxiliary"
HOLE = "hole"
EMPTY_ENDS = {"asked": "unanswered", "failed": "failed", "aborted": "aborted"}
"""Outcomes that explain why nothing was sampled; without one of them, missing output ids are a hole."""


@dataclass(slots=True)
class Intake:
    """A session's completions, told apart."""

    calls: list[Call]
    """All of them, in order of request."""
    placed: list[Call] = field(default_factory=list)
    """Those that stand in a trace."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Completion id to why it stands in none: auxiliary, hole, failed, aborted, unanswered."""

    def stats(
        self, traces: list[Trace], trained_in: dict[str, int], truncated: int, trimmed: int = 0
    ) -> dict[str, Any]:
        """The wire's `reconstruction_stats` and where each completion went. Raises BuilderError if one is lost.

        `trained_in` says of each placed completion in which trace its tokens carry the mask, `trimmed` how many of
        all these stand in none, since history spells them otherwise."""
        where = self.left_out | {each: f"trace:{number}" for each, number in trained_in.items()}
        unaccounted = [call.id for call in self.calls if call.id not in where]
        sampled = sum(len(call.output_ids) for call in self.placed)
        masked = sum(int(trace.loss_mask.sum()) for trace in traces)
        if unaccounted or len(where) != len(self.calls) or sampled != masked + trimmed:
            raise BuilderError(
                f"completions do not add up: {len(unaccounted)} of {len(self.calls)} are in no trace, "
                f"{masked} of {sampled} sampled tokens carry the mask",
                code="unaccounted",
                detail={"unaccounted": unaccounted},
            )
        reasons = Counter(self.left_out.values())
        return {
            "chains_total": len(traces),
            "chains_reconstructed_full": len(traces) - truncated,
            "chains_reconstructed_truncated": truncated,
            "completions_total": len(self.calls),
            "completions_merged": len(self.placed),
            "auxiliary": reasons[AUXILIARY],
            "holes": reasons[HOLE],
            "tokens_trimmed": trimmed,
            "by_completion": where,
        }


def take_in(calls: list[Call], *, include_auxiliary: bool) -> Intake:
    """Tell completions apart. Raises BuilderError if an id comes twice, or if the engine gave no token ids at all."""
    intake = Intake(calls)
    if len({call.id for call in calls}) != len(calls):
        raise BuilderError("a completion was handed in twice", code="duplicate_completion")
    for call in calls:
        why = _why_left_out(call, include_auxiliary)
        if why is None:
            intake.placed.append(call)
        else:
            intake.left_out[call.id] = why
    # One hole is flagged; nothing but holes means an engine that returns no ids, which must not pass as a
    # session that happens to have no traces.
    if not intake.placed and HOLE in intake.left_out.values():
        raise BuilderError(
            "no completion has output token ids: the engine, or a router before it, does not return them",
            code="no_token_ids",
        )
    return intake


def _why_left_out(call: Call, include_auxiliary: bool) -> str | None:
    if call.role == AUXILIARY and not include_auxiliary:
        return AUXILIARY
    if len(call.output_ids):
        return None
    return EMPTY_ENDS.get(call.outcome, HOLE)
