"""The certificate of a trace: how faithful it is, and what a trainer should know before training on it.

It states facts. Whether a trace may train is decided in rewards.py.

    flag                        says of the trace
    parent_mismatch             starts anew: its prompt does not start with its parent's tokens
    parent_missing              starts anew: the recorded parent is not among the earlier completions
    rewritten_history           the harness, or the template, changed what had been said
    tools_changed               the tools offered changed on the way, or made it start anew
    stop_replaced               a sampled stop is spelled otherwise in history; that token is not trained
    messages_differ             its messages do not line up turn by turn; its tokens do
    capture_hole                a completion on it, or right after it, has no output ids
    missing_prompt_ids          the engine did not say what it was given
    shared_prefix               begins with sampled tokens that another trace trains
    sibling                     another completion goes on from the same place
    retry                       another completion had the very same prompt: asked again, or several answers
    several_answers             one request asked for several answers
    ghost                       the harness never got the answer whole, and nothing continues it
    auxiliary                   holds a side call
    subagent                    holds a call of a sub-agent
    branched                    is a tree: only its node table says what each token was conditioned on
    auxiliary_context           goes on from a side call that has no trace
    aborted, failed             sampling was cut off
    unanswered                  the recording ends before the answer
    truncated                   sampling ran into the token limit
    missing_logprobs            a sampled token has no log-probability
    non_finite_logprobs         a log-probability is NaN or infinite
    sentinel_logprobs           a log-probability is an engine's stand-in (-9000 or less)
    positive_logprobs           a log-probability is above zero, which none can be
    raw_logprobs                log-probabilities are not of the distribution that the tokens were drawn from
    mixed_policy_versions       sampled by more than one version of the policy
    unknown_policy_version      of some sampled tokens it is not known which version sampled them
    continued                   sampling was cut while generation was paused, and went on from there

Two flags come with the verdict: `stale` (a trained token is further behind the policy than its bound) and
`staleness_unknown` (a bound is set, and its versions cannot all be compared).

Flags that the proxy put on a completion are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polar.builders.base import Call, Floats

SENTINEL = -9000.0
"""vLLM's stand-in is -9999.0; no token that was sampled is this unlikely."""
POSITIVE = 1e-4
"""Rounding of a log-probability near zero stays below this."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One completion's sampled tokens in a trace."""

    call: Call
    start: int
    """Of its first sampled token, in response coordinates."""
    trained: bool
    """Whether they carry the mask here; otherwise another trace has them and they are context."""
    trim: int = 0
    """How many at their end the next completion's prompt does not keep, so that they do not stand here."""

    @property
    def length(self) -> int:
        """How many of them stand here."""
        return len(self.call.output_ids) - self.trim

    @property
    def end(self) -> int:
        """After the last of them, in response coordinates."""
        return self.start + self.length


def certify(pieces: Sequence[Piece], flags: Iterable[str], difference: dict[str, Any] | None) -> dict[str, Any]:
    """The certificate of the trace that `pieces` make up; `flags` and `difference` come from the forest."""
    trained = [piece for piece in pieces if piece.trained]
    spans, version_flags = _versions(trained)
    found = set(flags) | version_flags
    for piece in pieces:
        found |= _call_flags(piece.call)
    for piece in trained:
        found |= _logprob_flags(piece.call)
    if any(piece.trim for piece in trained):
        found.add("stop_replaced")
    if len(trained) < len(pieces):
        found.add("shared_prefix")
    verified = _verified([piece.call for piece in pieces])
    return {
        "fidelity": {True: "exact", False: "drifted", None: "unverified"}[verified],
        "flags": sorted(found),
        "completions": len(pieces),
        "sampled_tokens": sum(piece.length for piece in trained),
        "policy_versions": spans,
        "first_difference": difference or _drift(pieces),
        "prompt_verified": verified,
    }


def usable_logprobs(call: Call) -> Floats | None:
    """One finite log-probability for each sampled token, or None: a NaN stands for none and is not JSON."""
    if call.logprobs is None or len(call.logprobs) != len(call.output_ids):
        return None
    return call.logprobs if bool(np.isfinite(call.logprobs).all()) else None


def _verified(calls: Sequence[Call]) -> bool | None:
    """False if the engine saw other ids for any prompt, else None if that is not known of some, else True."""
    known = [call.prompt_verified if len(call.prompt_ids) else None for call in calls]
    if False in known:
        return False
    return None if None in known else True


def _drift(pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """The first turn whose prompt the engine saw differently; the position only where the proxy noted it."""
    for turn, piece in enumerate(pieces):
        if piece.call.prompt_verified is False:
            position = piece.call.metadata.get("first_difference")
            return {"kind": "engine_prompt", "completion": piece.call.id, "turn": turn, "position": position}
    return None


def _call_flags(call: Call) -> set[str]:
    named = {
        "aborted": call.outcome == "aborted" or call.finish_reason == "abort",
        "failed": call.outcome == "failed",
        "unanswered": call.outcome == "asked",
        "truncated": call.finish_reason == "length",
        "missing_prompt_ids": len(call.prompt_ids) == 0,
        "auxiliary": call.role == "auxiliary",
        "subagent": call.role == "subagent",
        "several_answers": call.metadata.get("n", 1) > 1,
    }
    return {flag for flag, holds in named.items() if holds} | set(call.flags)


def _logprob_flags(call: Call) -> set[str]:
    if call.logprobs is None or len(call.logprobs) != len(call.output_ids):
        return {"missing_logprobs"}
    values = call.logprobs
    finite = np.isfinite(values)
    named = {
        "non_finite_logprobs": not finite.all(),
        "sentinel_logprobs": (values[finite] <= SENTINEL).any(),
        "positive_logprobs": (values[finite] > POSITIVE).any(),
    }
    return {flag for flag, holds in named.items() if holds}


def _versions(trained: Sequence[Piece]) -> tuple[list[dict[str, Any]], set[str]]:
    """Spans of policy versions over the trained tokens, in response coordinates, and what is wrong with them."""
    spans: list[dict[str, Any]] = []
    covered = 0
    for piece in trained:
        length = piece.length
        for span in piece.call.policy_versions:
            start = min(max(int(span.get("start", 0)), 0), length)
            end = min(max(int(span.get("end", length)), start), length)
            if span.get("version") is None or start == end:
                continue
            covered += end - start
            spans.append({"version": span["version"], "start": piece.start + start, "end": piece.start + end})
    flags = set()
    if len({str(span["version"]) for span in spans}) > 1:
        flags.add("mixed_policy_versions")
    if spans and covered < sum(piece.length for piece in trained):
        flags.add("unknown_policy_version")
    return spans, flags
