"""Evaluate: the session gets a verdict, and each trace its reward and its right to train.

What the verdict is decides the evaluator; what follows from it for each trace, `rewards.decide`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import orjson
import zstandard
from sqlalchemy import select
from sqlalchemy.orm import Session

from polar import evaluators, runtimes
from polar.db import transaction
from polar.evaluators.base import Case
from polar.models import RolloutSession, TraceRow
from polar.rewards import Decision, Ending, TraceFacts, decide
from polar.spec import EvaluatorSpec
from polar.stages.base import Job, Outcome
from polar.stages.prewarm import fresh_runtime


def evaluate(job: Job) -> Outcome:
    with transaction(job.database) as db:
        traces = list(
            db.scalars(select(TraceRow).where(TraceRow.session_id == job.session.id).order_by(TraceRow.number))
        )
    spec = job.task.evaluator
    verdict = None if spec is None else evaluators.create(spec).evaluate(_case(job, spec, traces))
    decisions = decide(
        Ending(agent=(job.session.agent_exit or {}).get("state"), trajectory=bool(traces)),
        [_facts(trace) for trace in traces],
        verdict=verdict,
        evaluator=spec.strategy if spec else None,
        strict=job.task.strict,
        builder=job.task.builder.strategy,
    )
    job.write(lambda db, row: _store(db, row, decisions))
    values: dict[str, Any] = {"reward": verdict.outcome_reward if verdict else None}
    if spec is not None and verdict is not None:
        values["verdict"] = {"strategy": spec.strategy, **asdict(verdict), "decisions": [asdict(d) for d in decisions]}
    return Outcome(values, says=f"reward={values['reward']}")


def _case(job: Job, spec: EvaluatorSpec, traces: list[TraceRow]) -> Case:
    handle = job.handles.get("agent")
    agent_runtime = runtimes.attach(handle) if handle else None
    runtime = fresh_runtime(job, "evaluator") if spec.refresh_runtime else agent_runtime
    env = {**(job.env(runtime.workdir) if runtime else {}), **spec.env}
    return Case(
        task=job.task,
        session_id=job.session.id,
        traces=[orjson.loads(zstandard.decompress(trace.body)) for trace in traces],
        agent_exit=job.session.agent_exit or {},
        runtime=runtime,
        agent_runtime=agent_runtime,
        env=env,
        limits=job.limits(),
        logs=job.logs,
    )


def _facts(trace: TraceRow) -> TraceFacts:
    sampled = int(np.frombuffer(trace.loss_mask, np.uint8).sum())
    return TraceFacts(trace.fidelity, tuple(trace.certificate.get("flags", ())), sampled)


def _store(db: Session, row: RolloutSession, decisions: list[Decision]) -> None:
    stored = db.scalars(select(TraceRow).where(TraceRow.session_id == row.id).order_by(TraceRow.number))
    for trace, decision in zip(stored, decisions, strict=True):
        trace.reward, trace.trainable, trace.weight = decision.reward, decision.trainable, decision.weight
