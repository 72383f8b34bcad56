"""Reconstruct: the attempt's completions become a trajectory, stored trace by trace.

What a trace is decides the builder; whether it may train, and with what reward, is decided after the verdict.
"""

from __future__ import annotations

from typing import Any

import orjson
import zstandard
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from polar import builders
from polar.builders.base import Built, Call, Trace
from polar.db import transaction
from polar.models import Completion, RolloutSession, TraceRow, TrajectoryRow, now
from polar.stages.base import Job, Outcome
from polar.stages.calls import load_calls
from polar.stages.roles import assign

NOTE_SECONDS = 1.0
"""How long after an answer the proxy's note that its client holds it may still be on its way."""


def reconstruct(job: Job) -> Outcome:
    recorded = _recorded(job)
    calls = assign(recorded, job.task.agent.model_name)
    built = builders.create(job.task.builder).build(calls)
    trajectory = TrajectoryRow(
        session_id=job.session.id,
        attempt=job.session.attempt,
        builder=job.task.builder.strategy,
        meta=_metadata(calls, built),
    )
    rows = [_row(job.session.id, number, trace) for number, trace in enumerate(built.traces)]

    def store(db: Session, row: RolloutSession) -> None:
        for before, after in zip(recorded, calls, strict=True):
            if after.role != before.role:
                told = {name: after.metadata[name] for name in ("role_reason", "spawned_by") if name in after.metadata}
                db.execute(
                    update(Completion)
                    .where(Completion.id == after.id)
                    .values(role=after.role, parsed=Completion.parsed.concat(told))
                )
        db.execute(delete(TraceRow).where(TraceRow.session_id == row.id))
        db.execute(delete(TrajectoryRow).where(TrajectoryRow.session_id == row.id))
        db.add(trajectory)
        db.add_all(rows)

    job.write(store)
    return Outcome(says=f"completions={len(calls)} traces={len(rows)}")


def _recorded(job: Job) -> list[Call]:
    """The attempt's calls. An agent may end with its last answer, which without its note would be taken for a ghost."""
    attempt = job.session.execute_attempt or job.session.attempt
    with transaction(job.database) as db:
        calls = load_calls(db, job.session.id, attempt)
        late = [call.id for call in calls if call.outcome == "answered" and not call.delivered]
        newest = db.scalar(select(func.max(Completion.finished_at)).where(Completion.id.in_(late))) if late else None
    if newest is None or (left := NOTE_SECONDS - (now() - newest).total_seconds()) <= 0:
        return calls
    job.cancelled.wait(left)
    with transaction(job.database) as db:
        return load_calls(db, job.session.id, attempt)


def _metadata(calls: list[Call], built: Built) -> dict[str, Any]:
    first = calls[0] if calls else None
    return {
        "api_type": first.metadata["dialect"] if first else None,
        "model_requested": first.model_requested if first else None,
        # Not simply the first one's: a call that was cut off before its answer does not say.
        "model_used": next((call.model_used for call in calls if call.model_used), first.model_used if first else None),
        "record_count": len(calls),
        "reconstruction_stats": built.stats,
    }


def _row(session_id: str, number: int, trace: Trace) -> TraceRow:
    body = {
        "prompt_messages": trace.prompt_messages,
        "response_messages": trace.response_messages,
        "tools": trace.tools,
        "finish_reason": trace.finish_reason,
        "metadata": {**trace.metadata, "completion_ids": trace.completion_ids},
    }
    return TraceRow(
        session_id=session_id,
        number=number,
        prompt_ids=trace.prompt_ids.astype("<i4").tobytes(),
        response_ids=trace.response_ids.astype("<i4").tobytes(),
        loss_mask=trace.loss_mask.astype("u1").tobytes(),
        logprobs=None if trace.logprobs is None else trace.logprobs.astype("<f4").tobytes(),
        fidelity=trace.fidelity,
        certificate=trace.certificate,
        body=zstandard.compress(orjson.dumps(body)),
    )
