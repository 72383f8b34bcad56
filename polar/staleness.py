"""How far a trace's tokens are behind the policy, and whether that is too far. Pure.

Versions are compared where they are whole numbers. A token without a version is as old as the task says that the
policy was at submit (`metadata.policy_version`), if it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polar.policy import number

STALE = "stale"
UNKNOWN = "staleness_unknown"
UNNAMED = "default"
"""What SGLang calls the weights of an engine that was never told a version."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """What is known of one trace, for its certificate."""

    policy_version: str | None
    """At the time of judging."""
    bound: int
    oldest: int | None
    behind: int | None
    reason: str | None = None
    """Why it is not known of all tokens."""

    @property
    def flag(self) -> str | None:
        """`stale`, `staleness_unknown`, or none for a trace that is known to be fresh enough."""
        if self.behind is not None and self.behind > self.bound:
            return STALE
        return UNKNOWN if self.reason else None


def staleness(
    spans: Sequence[Mapping[str, Any]],
    sampled_tokens: int,
    *,
    bound: int | None,
    policy_version: str | None,
    submitted_at: object = None,
) -> Staleness | None:
    """Of a trace with these version spans over its trained tokens; None without a bound or without such tokens."""
    if bound is None or sampled_tokens == 0:
        return None
    named = [span for span in spans if span["version"] not in (None, UNNAMED)]
    versions: set[object] = {span["version"] for span in named}
    if sum(span["end"] - span["start"] for span in named) < sampled_tokens:
        versions.add(submitted_at)
    numbers = [whole for version in versions if (whole := number(version)) is not None]
    latest = number(policy_version)
    oldest = min(numbers, default=None)
    behind = None if latest is None or oldest is None else latest - oldest
    return Staleness(policy_version, bound, oldest, behind, _unknown(versions, policy_version))


def _unknown(versions: set[object], policy_version: str | None) -> str | None:
    if policy_version is None:
        return "the policy has no version"
    if number(policy_version) is None:
        return f"the policy's version {policy_version!r} is no whole number"
    for version in sorted(versions, key=str):
        if version is None:
            return "some tokens have no version, and the task no metadata.policy_version"
        if number(version) is None:
            return f"the version {version!r} is no whole number"
    return None
