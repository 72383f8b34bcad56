"""Prewarm: a runtime is created, started and prepared, and left for execute to take up.

The handle is written before the runtime starts: whatever a crash leaves behind has a row that names it.
"""

from __future__ import annotations

import time
from pathlib import Path

from polar import runtimes
from polar.errors import LostLeaseError, PrepareError, RuntimeFault
from polar.runtimes.base import ExecResult, Limits, Runtime
from polar.spec import PrepareAction
from polar.stages.base import Job, Outcome
from polar.stages.guard import check_source


def prewarm(job: Job) -> Outcome:
    runtime = fresh_runtime(job, "agent")
    return Outcome(says=f"runtime={runtime.name}")


def fresh_runtime(job: Job, use: str) -> Runtime:
    """Start and prepare a runtime for `use` ("agent" or "evaluator"), replacing one that is there."""
    old = job.handles.get(use)
    if old is not None:
        runtimes.attach(old).destroy()
    folder = job.folder / f"{use}-{job.session.attempt}"
    runtime = runtimes.create(job.runtime_spec(), job.session.id, folder)
    job.keep(use, runtime.handle())
    limits = job.limits()
    runtime.start(limits)
    spec = job.runtime_spec()
    actions = spec.prepare
    if use == "evaluator" and spec.eval_prepare is not None:
        actions = spec.eval_prepare
    for number, action in enumerate(actions):
        prepare(job, runtime, action, limits, f"{use}-prepare.{number:02d}")
    return runtime


def prepare(job: Job, runtime: Runtime, action: PrepareAction, limits: Limits, label: str) -> None:
    """Do one prepare action, as often as it allows. Raises PrepareError."""
    if action.type != "exec":
        source = Path(str(action.source)).expanduser()
        check_source(source, job.settings)
        if not source.exists():
            raise PrepareError(f"{label}: {action.source} does not exist on node {job.node.id}")
        try:
            runtime.upload(source, str(action.target))
        except RuntimeFault as error:
            raise PrepareError(f"{label}: {error.message}") from error
        return
    env = {**job.env(runtime.workdir), **(action.env or {})}
    result = ExecResult(None)
    for turn in range(action.max_attempts):
        if turn:
            time.sleep(min(action.retry_backoff_seconds * 2 ** (turn - 1), limits.left() or 0, 5.0))
        result = runtime.exec(str(action.command), limits=limits, env=env, cwd=action.cwd, log=job.logs / label)
        if result.ok:
            return
        if result.timed_out or result.cancelled:
            break
    if result.cancelled:
        raise LostLeaseError(f"session {job.session.id} ended during prepare")
    raise PrepareError(f"{label}: command {result.summary()}", code="prepare_failed")
