"""Execute: the harness runs in the prepared runtime, with a key of its own to the proxy.

The key is made here, given to the harness, and only its hash is kept; a new attempt has a new key and a
fresh runtime. How the agent ended is a result (`agent_exit`), not the session's state: a partial
trajectory is still built and judged, unless it was the node's proxy that the agent failed on. A harness that made no
model call is a failure that says so.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import asdict
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from polar import harnesses, runtimes
from polar.db import transaction
from polar.errors import EngineError, HarnessError, LostLeaseError, NodeError, SessionError
from polar.harnesses.base import AgentExit, Connection, Workplace
from polar.runtimes.base import Runtime
from polar.stages.base import Job, Outcome
from polar.stages.fitness import require_fit
from polar.stages.guard import error_without, exit_without, logs_without
from polar.stages.prewarm import evaluator_ahead, fresh_runtime
from polar.stages.proxy_fault import await_proxy, proxy_fault

ENGINE_FAULTS = ("no_token_ids", "engine_altered_prompt")
"""Codes of what breaks the promise that a trace has the tokens that were seen and sampled."""
CALLS = text(
    """
    SELECT (SELECT error FROM completions WHERE session_id = :session AND attempt = :attempt
            AND error ->> 'code' = ANY(:faults) ORDER BY seq LIMIT 1),
           count(*) FILTER (WHERE outcome IN ('answered', 'aborted'))
    FROM completions WHERE session_id = :session AND attempt = :attempt
    """
)


def execute(job: Job) -> Outcome:
    require_fit(job)
    runtime = _untouched_runtime(job)
    place = _workplace(job, runtime)
    harness = harnesses.create(job.task.agent)
    try:
        with evaluator_ahead(job):
            agent_exit = exit_without(place.connection.api_key, _run(harness, place))
    except SessionError as error:
        error_without(place.connection.api_key, error)
        # A program that an engine's fault made fail is not to blame for it.
        if isinstance(error, HarnessError):
            with transaction(job.database) as db:
                fault, _ = _calls(db, job)
            if fault is not None:
                raise fault from error
        raise
    finally:
        runtime.kill_all()
        logs_without(place.connection.api_key, place.logs)
    if agent_exit.state == "cancelled":
        raise LostLeaseError(f"session {job.session.id} ended while its agent ran")
    harness.collect(place)
    logs_without(place.connection.api_key, place.logs)
    with transaction(job.database) as db:
        fault, calls = _calls(db, job)
    if fault is not None:
        raise fault
    if agent_exit.state == "failed" and (why := proxy_fault(job)) is not None:
        await_proxy(job)
        raise NodeError(f"{why}; the agent failed on it: {agent_exit.error}", code="proxy_lost", retryable=True)
    values: dict[str, Any] = {"agent_exit": asdict(agent_exit), "key_hash": None}
    if calls == 0:
        why = agent_exit.error or "it ended without an error of its own"
        message = f"harness {job.task.agent.name} made no model call that was answered: {why}"
        raise HarnessError(message, code="no_model_calls", detail={"agent_exit": values["agent_exit"]})
    return Outcome(values, says=f"agent={agent_exit.state} calls={calls}")


def _calls(db: Session, job: Job) -> tuple[EngineError | None, int]:
    """What an engine did to a call of this attempt that makes all its traces worthless, if it did; calls answered."""
    asked = {"session": job.session.id, "attempt": job.session.attempt, "faults": list(ENGINE_FAULTS)}
    error, answered = db.execute(CALLS, asked).one()
    return EngineError(error["message"], code=error["code"]) if error else None, answered


def _run(harness: harnesses.Harness, place: Workplace) -> AgentExit:
    try:
        harness.setup(place)
        return harness.run(place)
    except HarnessError as error:
        if place.limits.cancelled.is_set():
            return AgentExit("cancelled", None, error.message)
        if place.limits.left() == 0:
            return AgentExit("timed_out", None, error.message)
        raise


def _untouched_runtime(job: Job) -> Runtime:
    """The prewarmed runtime, unless an earlier attempt has been in it."""
    handle = job.handles.get("agent")
    if handle is None or handle.get("used_by") not in (None, job.session.attempt):
        runtime = fresh_runtime(job, "agent")
    else:
        runtime = runtimes.attach(handle)
    return runtime


def _workplace(job: Job, runtime: Runtime) -> Workplace:
    key = "sk-polar-" + secrets.token_urlsafe(32)
    used = {**job.handles["agent"], "used_by": job.session.attempt}
    job.keep("agent", used, key_hash=hashlib.sha256(key.encode()).digest())
    model = job.task.agent.model_name or job.lane.engine.model or "policy"
    connection = Connection(runtime.reach(job.node.url), key, model)
    env = {**job.env(runtime.workdir), **connection.env(), **job.task.agent.env}
    return Workplace(
        runtime=runtime,
        connection=connection,
        instruction=job.task.instruction,
        env=env,
        limits=job.limits(job.task.agent_budget),
        logs=job.logs,
        cache=job.settings.harness_cache,
    )
