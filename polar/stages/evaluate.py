"""Evaluate: the session gets a verdict, and each trace its reward and its right to train.

What the verdict is decides the evaluator; what follows from it for each trace, `rewards.decide`. Before an evaluator
looks at the agent's own runtime, all that still runs in there is ended; what it found is kept within bounds.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import orjson
import zstandard
from sqlalchemy import select
from sqlalchemy.orm import Session

from polar import evaluators, runtimes
from polar.db import transaction
from polar.delivery.callbacks import check_url
from polar.errors import EvaluatorError, PolarError, SessionError
from polar.evaluators.base import Case, Verdict
from polar.evaluators.evidence import bounded
from polar.models import RolloutSession, TraceRow
from polar.policy import current as current_policy
from polar.rewards import Decision, Ending, TraceFacts, decide
from polar.spec import EvaluatorSpec
from polar.stages.base import Job, Outcome
from polar.stages.guard import check_source
from polar.stages.prewarm import ready_evaluator
from polar.staleness import STALE, UNKNOWN, staleness


def evaluate(job: Job) -> Outcome:
    with transaction(job.database) as db:
        traces = list(
            db.scalars(select(TraceRow).where(TraceRow.session_id == job.session.id).order_by(TraceRow.number))
        )
    spec = job.task.evaluator
    verdict = None if spec is None else _verdict(job, spec, traces)
    certificates = _certified(job, traces)
    decisions = decide(
        Ending(agent=(job.session.agent_exit or {}).get("state"), trajectory=bool(traces)),
        [_facts(trace, certificate) for trace, certificate in zip(traces, certificates, strict=True)],
        verdict=verdict,
        evaluator=spec.strategy if spec else None,
        strict=job.task.strict,
        builder=job.task.builder.strategy,
    )
    job.write(lambda db, row: _store(db, row, decisions, certificates))
    values: dict[str, Any] = {"reward": verdict.outcome_reward if verdict else None}
    if spec is not None and verdict is not None:
        values["verdict"] = {"strategy": spec.strategy, **asdict(verdict), "decisions": [asdict(d) for d in decisions]}
    return Outcome(values, says=f"reward={values['reward']}")


def _verdict(job: Job, spec: EvaluatorSpec, traces: list[TraceRow]) -> Verdict:
    """What the evaluator finds, its evidence fit to be kept. Raises EvaluatorError, or what a runtime raises."""
    evaluator = evaluators.create(spec)
    case = _case(job, spec, traces)
    try:
        verdict = evaluator.evaluate(case)
    except SessionError as error:
        error.detail = bounded(error.detail)
        raise
    except PolarError:
        raise
    except Exception as error:  # noqa: BLE001 - a task's own class may raise anything, and then it is to blame
        message = f"{spec.strategy} broke: {type(error).__name__}: {error}"
        raise EvaluatorError(message, code="evaluator_broke") from error
    if not isinstance(verdict, Verdict):
        raise EvaluatorError(f"{spec.strategy} returned {verdict!r:.200}; a Verdict is wanted", code="evaluator_broke")
    return replace(verdict, evidence=bounded(verdict.evidence))


def _case(job: Job, spec: EvaluatorSpec, traces: list[TraceRow]) -> Case:
    handle = job.handles.get("agent")
    agent_runtime = runtimes.attach(handle) if handle else None
    if agent_runtime is not None:
        # Execute ended the agent's processes, but collecting its logs ran commands of the agent's own making there.
        agent_runtime.kill_all()
    runtime = ready_evaluator(job) if spec.refresh_runtime else agent_runtime
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
        check_source=partial(check_source, settings=job.settings),
        check_url=partial(
            check_url, allow=job.settings.judge_allow, field="judge_base_url", setting="POLAR_JUDGE_ALLOW"
        ),
    )


def _certified(job: Job, traces: list[TraceRow]) -> list[dict[str, Any]]:
    """The traces' certificates, with how far they are behind the policy as it is now, where a bound is set."""
    with transaction(job.database) as db:
        policy = current_policy(db)
        bound, version = policy.max_staleness, policy.version
    if job.task.max_staleness is not None:
        bound = job.task.max_staleness
    found = []
    for trace in traces:
        certificate = {name: value for name, value in trace.certificate.items() if name != "staleness"}
        flags = set(certificate.get("flags", ())) - {STALE, UNKNOWN}
        behind = staleness(
            certificate.get("policy_versions", ()),
            _sampled(trace),
            bound=bound,
            policy_version=version,
            submitted_at=job.task.metadata.get("policy_version"),
        )
        if behind is not None:
            certificate["staleness"] = asdict(behind)
            flags |= {behind.flag} if behind.flag else set()
        found.append({**certificate, "flags": sorted(flags)})
    return found


def _sampled(trace: TraceRow) -> int:
    return int(np.frombuffer(trace.loss_mask, np.uint8).sum())


def _facts(trace: TraceRow, certificate: dict[str, Any]) -> TraceFacts:
    return TraceFacts(trace.fidelity, tuple(certificate["flags"]), _sampled(trace))


def _store(db: Session, row: RolloutSession, decisions: list[Decision], certificates: list[dict[str, Any]]) -> None:
    stored = db.scalars(select(TraceRow).where(TraceRow.session_id == row.id).order_by(TraceRow.number))
    for trace, decision, certificate in zip(stored, decisions, certificates, strict=True):
        trace.reward, trace.trainable, trace.weight = decision.reward, decision.trainable, decision.weight
        trace.certificate = {**certificate, "decision": {"rule": decision.rule, "reason": decision.reason}}
