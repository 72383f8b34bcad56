"""Traces as they may train now: what was fresh when it was judged can be too old when it is handed out.

Only traces that could train are looked at, and only where a bound is set. The rows stay as they were judged; a trace
that is too old goes out as not trainable, and the session's other traces share its weight. How old is too old is
`staleness`'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from polar import queries
from polar.models import Policy, RolloutSession, Task, TraceRow, TrajectoryRow
from polar.staleness import STALE, staleness

RULE = "stale_at_delivery"
REASON = "it was fresh enough when it was judged, and the policy has moved on since"
Found = dict[str, tuple[TrajectoryRow, list[TraceRow]]]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session's traces are held to."""

    version: str
    bound: int
    submitted_at: Any
    """`metadata.policy_version` of the task."""


def trajectories_of(db: Session, ids: Sequence[str]) -> Found:
    """Trajectories with their traces, by session id, as they may train now."""
    found = queries.trajectories_of(db, ids)
    for session_id, terms in _terms(db, found).items():
        refresh(db, found[session_id][1], terms)
    return found


def refresh(db: Session, rows: Sequence[TraceRow], terms: Terms) -> None:
    """Mark what is too old by now. The rows are taken out of the transaction: this is not written back."""
    stale = []
    for row in rows:
        behind = None
        if row.trainable:
            sampled = int(np.frombuffer(row.loss_mask, np.uint8).sum())
            behind = staleness(
                row.certificate.get("policy_versions", ()),
                sampled,
                bound=terms.bound,
                policy_version=terms.version,
                submitted_at=terms.submitted_at,
            )
        if behind is not None and behind.flag == STALE:
            stale.append((row, behind))
    if not stale:
        return
    for row in rows:
        db.expunge(row)
    for row, behind in stale:
        row.trainable, row.weight = False, 0.0
        row.certificate = {
            **row.certificate,
            "flags": sorted({*row.certificate.get("flags", ()), STALE}),
            "staleness": asdict(behind),
            "decision": {"rule": RULE, "reason": REASON},
        }
    usable = [row for row in rows if row.trainable]
    for row in usable:
        row.weight = 1 / len(usable)


def _terms(db: Session, found: Mapping[str, Any]) -> dict[str, Terms]:
    """Of the sessions that a bound holds for."""
    policy = db.scalar(select(Policy))
    if policy is None or policy.version is None or not found:
        return {}
    query = (
        select(RolloutSession.id, Task.spec["max_staleness"], Task.spec["metadata"]["policy_version"])
        .join(Task)
        .where(RolloutSession.id.in_(found))
    )
    answer = {}
    for session_id, own, submitted_at in db.execute(query):
        bound = own if own is not None else policy.max_staleness
        if bound is not None:
            answer[session_id] = Terms(policy.version, bound, submitted_at)
    return answer
