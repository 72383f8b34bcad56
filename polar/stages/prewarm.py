"""Prewarm: a runtime is created, started and prepared, and left for execute to take up.

The handle is written before the runtime starts: whatever a crash leaves behind has a row that names it. What
runtimes start from is fetched here, once per node. A task whose steps come out the same every time starts from a
copy of what they made (prepared.py); and while an agent runs, the fresh runtime of its evaluator is made ready.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from polar import runtimes
from polar.errors import LostLeaseError, PolarError, PrepareError, RuntimeFault
from polar.log import line
from polar.runtimes.base import ExecResult, Limits, Runtime
from polar.settings import Settings
from polar.spec import PrepareAction
from polar.stages import prepared
from polar.stages.base import Job, Outcome
from polar.stages.guard import check_source

logger = logging.getLogger(__name__)


def prewarm(job: Job) -> Outcome:
    runtime = fresh_runtime(job, "agent")
    return Outcome(says=f"runtime={runtime.name}")


def fresh_runtime(job: Job, use: str) -> Runtime:
    """Start and prepare a runtime for `use` ("agent" or "evaluator"), replacing one that is there."""
    old = job.handles.get(use)
    if old is not None:
        runtimes.attach(old).destroy()
    runtime = _made(job, job.session.id, job.folder / f"{use}-{job.session.attempt}", use)
    job.keep(use, runtime.handle())
    spec, limits = runtime.spec, job.limits()
    actions = spec.prepare
    if use == "evaluator" and spec.eval_prepare is not None:
        actions = spec.eval_prepare
    content = runtime.fetch(limits, job.logs / "image.log")
    if not (spec.prepare_once and actions and job.settings.prepared_states and _copied(job, runtime, actions, content)):
        runtime.start(limits)
        _prepare_all(job, runtime, actions, use, job.env(runtime.workdir))
    return runtime


@contextmanager
def evaluator_ahead(job: Job) -> Iterator[None]:
    """While inside, the fresh runtime that the task's evaluator wants, if it wants one, is made ready.

    If that fails, evaluate makes it again, and it is evaluate that fails."""
    if job.task.evaluator is None or not job.task.evaluator.refresh_runtime:
        yield
        return
    stop = threading.Event()
    ahead = replace(job, cancelled=stop)
    thread = threading.Thread(target=_ready_for_evaluator, args=(ahead,), name="evaluator-ahead")
    thread.start()
    try:
        yield
    except BaseException:
        stop.set()
        raise
    finally:
        thread.join()


def ready_evaluator(job: Job) -> Runtime:
    """The runtime made ready while the agent ran, once; else a fresh one."""
    handle = job.handles.get("evaluator")
    if handle is None or handle.get("ready_for") != job.session.execute_attempt or "used_by" in handle:
        runtime = fresh_runtime(job, "evaluator")
        handle = job.handles["evaluator"]
    else:
        runtime = runtimes.attach(handle)
    job.keep("evaluator", {**handle, "used_by": job.session.attempt})
    return runtime


def home_label(settings: Settings) -> str:
    """What sandboxes are marked with: this machine's Polar home, and no other's that shares a daemon with it."""
    return f"{socket.gethostname()}:{settings.home_path}"


def _ready_for_evaluator(job: Job) -> None:
    try:
        runtime = fresh_runtime(job, "evaluator")
        job.keep("evaluator", {**runtime.handle(), "ready_for": job.session.attempt})
    except PolarError as error:
        logger.info(line("evaluator's runtime not ready ahead", session=job.session.id, cause=error.message))


def _made(job: Job, owner: str, folder: Path, use: str) -> Runtime:
    """A runtime that is not started yet, with what it must know before. Raises PrepareError."""
    runtime = runtimes.create(job.runtime_spec(), owner, folder)
    for source in runtime.sources(runtime.spec):
        check_source(source, job.settings)
    attempt = str(job.session.attempt)
    runtime.labels = {"home": home_label(job.settings), "node": job.node.id, "attempt": attempt, "use": use}
    job.settings.harness_cache.mkdir(parents=True, exist_ok=True)
    runtime.exposable = (job.settings.harness_cache,)
    return runtime


def _copied(job: Job, runtime: Runtime, actions: Sequence[PrepareAction], content: str) -> bool:
    """Start the runtime from a copy of its prepared state; False if there can be none."""
    limits, folder = job.limits(), job.settings.prepared_folder
    for action in actions:
        _check(job, action, "prepare")
    key = prepared.key_of(runtime.spec, content, actions)

    def make(place: Path) -> None:
        maker = _made(job, prepared.OWNER + key[:16], place.with_suffix(".maker"), "prepared")
        prepared.keep(place, maker, work)
        if prepared.key_of(runtime.spec, content, actions) != key:
            raise RuntimeFault("files of the prepare steps were changed while they were uploaded")

    def work(maker: Runtime) -> None:
        maker.start(limits)
        # None of the session's own: what is kept must not tell one session of another.
        own = {"SESSION_DIR": maker.workdir, **maker.spec.env}
        _prepare_all(job, maker, actions, "prepared", own)

    try:
        with prepared.state(folder, key, limits, make) as place:
            if place is None:
                return False
            runtime.start_from(place, limits)
    except TimeoutError as error:
        raise PrepareError(f"prepare: {error}") from error
    prepared.trim(folder, prepared.Bounds.of(job.settings))
    return True


def _prepare_all(job: Job, runtime: Runtime, actions: Sequence[PrepareAction], use: str, env: dict[str, str]) -> None:
    limits = job.limits()
    for number, action in enumerate(actions):
        prepare(job, runtime, action, limits, f"{use}-prepare.{number:02d}", env)


def _check(job: Job, action: PrepareAction, label: str) -> Path | None:
    """What an upload action copies, if it may. Raises PrepareError."""
    if action.type == "exec":
        return None
    source = Path(str(action.source)).expanduser()
    check_source(source, job.settings)
    if not source.exists():
        raise PrepareError(f"{label}: {action.source} does not exist on node {job.node.id}")
    return source


def prepare(job: Job, runtime: Runtime, action: PrepareAction, limits: Limits, label: str, env: dict[str, str]) -> None:
    """Do one prepare action, as often as it allows. Raises PrepareError."""
    source = _check(job, action, label)
    if source is not None:
        try:
            runtime.upload(source, str(action.target))
        except RuntimeFault as error:
            raise PrepareError(f"{label}: {error.message}") from error
        return
    env = {**env, **(action.env or {})}
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
