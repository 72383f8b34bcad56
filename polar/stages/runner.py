"""One stage of one session, from claim to move: what surrounds every stage, and no stage mentions.

Claim, lease, budget, the classification of errors, and the guarded move. Publishing is the dispatcher's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from polar import lanes, lifecycle, placement, policy, runtimes, tracing
from polar.db import AWAY, after_commit, transaction
from polar.dispatch import Dispatcher
from polar.errors import EngineError, LostLeaseError, NodeError, RuntimeFault, SessionError
from polar.leases import LeaseKeeper
from polar.lifecycle import Stage, State
from polar.log import line
from polar.models import RolloutSession
from polar.settings import Settings
from polar.spec import TaskRequest
from polar.stages import STAGE_RUNS, fitness, orphans
from polar.stages.base import Job, Outcome
from polar.topology import LaneSpec, NodeSpec

logger = logging.getLogger(__name__)
AGAIN_SECONDS = 0.5
DOWN_AFTER = 2
"""Looks in a row that find no engine, until the lane says so: one may meet a restart."""
KEPT_REQUESTS = 64
SWEEP_SECONDS = 30.0
"""Between looks for what no row names."""
LOST = "lost"
"""In place of a state: somebody else moved the session on, and this worker cannot say how it does."""


@dataclass(slots=True)
class Lane:
    """A lane at work in this process."""

    database: Engine
    settings: Settings
    node: NodeSpec
    spec: LaneSpec
    dispatcher: Dispatcher
    leases: LeaseKeeper
    worker: str
    _misses: int = 0
    """Looks in a row that found no engine."""
    _requests: dict[UUID, TaskRequest] = field(default_factory=dict)
    swept_at: float = 0.0
    """When this process last looked for leftovers that no row names."""

    def run(self, session_id: str, stage: Stage) -> bool:
        """Do one stage; True if the session went on to the next, so that its chain may go on."""
        if self.leases.stopping.is_set():
            return False
        with transaction(self.database) as db:
            session = lifecycle.claim(db, session_id, stage, self.worker, self.spec.name)
            if session is None:
                return False
            task = self._request(session)
            pauses = policy.pauses(db)
        clock = self.leases.clock
        clock.heard(pauses)
        started = time.monotonic()
        with self.leases.hold(session.id, session.attempt) as lost:
            place = (self.database, self.settings, self.node, self.spec)
            job = Job(session, task, *place, lost, clock, pauses.closed_for or 0.0)
            says, state, error = "", LOST, None
            try:
                outcome = STAGE_RUNS[stage](job)
                says = outcome.says
                state = self._settled(job, partial(self._advance, job, outcome))
            except LostLeaseError:
                self._lost(job)
            except SessionError as failure:
                error = failure
            except AWAY as failure:
                reason = str(failure.orig or failure).splitlines()[0]
                error = NodeError(f"the database was away in {stage}: {reason}", code="database_down")
            except Exception as failure:  # noqa: BLE001 - a bug must end this session with a word, not hang it
                logger.exception(line("stage broke", session=session.id, stage=stage))
                error = NodeError(f"{stage} broke: {type(failure).__name__}: {failure}", code="bug", retryable=False)
            if error is not None:
                state = self._settled(job, partial(self._failed, job, error))
        self._tell(job, stage, state, time.monotonic() - started, says, error)
        self._after(stage, went_on=error is None)
        return error is None and state != LOST

    def _request(self, session: RolloutSession) -> TaskRequest:
        """Read and parsed once for many of a task's sessions: what was submitted never changes."""
        found = self._requests.get(session.task_pk)
        if found is None:
            if len(self._requests) >= KEPT_REQUESTS:
                self._requests.clear()
            found = self._requests[session.task_pk] = TaskRequest.model_validate(session.task.spec)
        return found

    def _tell(self, job: Job, stage: Stage, state: str, seconds: float, says: str, error: SessionError | None) -> None:
        """The one line and the one span of a stage that ended."""
        told = line(
            "stage",
            task=job.task.task_id,
            session=job.session.id,
            stage=stage.value,
            lane=self.spec.name,
            attempt=job.session.attempt,
            state=state,
            seconds=round(seconds, 3),
            blame=error.blame if error else None,
            code=error.code if error else None,
            says=error.message if error else says or None,
        )
        logger.info(told)
        facts = {"polar.task": job.task.task_id, "polar.lane": self.spec.name, "polar.node": self.node.id}
        fault = error.code if error else (LOST if state == LOST else None)
        tracing.stage(job.session.id, job.session.attempt, stage.value, seconds, facts, fault)

    def _settled(self, job: Job, move: Callable[[], str]) -> str:
        """What the stage's last move says; a database that is away is waited for as long as the lease holds."""
        while True:
            try:
                return move()
            except AWAY as error:
                logger.warning(line("could not move on yet", session=job.session.id, error=type(error).__name__))
                if job.cancelled.wait(AGAIN_SECONDS):
                    return LOST

    def _advance(self, job: Job, outcome: Outcome) -> str:
        """How the session does then."""
        with transaction(self.database) as db:
            session = db.merge(job.session, load=False)
            if lifecycle.advance(db, session, **outcome.values) is None:
                after_commit(db, partial(self.clean, session))
            return session.state

    def _lost(self, job: Job) -> str:
        """Nothing to write, unless it was this process that is being stopped: then the session is given back."""
        if self.leases.stopping.is_set():
            with suppress(LostLeaseError, *AWAY), transaction(self.database) as db:
                lifecycle.release(db, db.merge(job.session, load=False))
        return LOST

    def _failed(self, job: Job, error: SessionError) -> str:
        """How the session does then."""
        if job.cancelled.is_set():
            return self._lost(job)  # what a stage that was stopped says is no finding of its own
        try:
            with transaction(self.database) as db:
                session = db.merge(job.session, load=False)
                if job.out_of_time and not isinstance(error, NodeError):
                    lifecycle.time_out(db, session)
                elif error.retryable:
                    lifecycle.retry(db, session, error)
                else:
                    lifecycle.fail(db, session, error)
                if session.state == State.QUEUED:
                    after_commit(db, partial(self.dispatcher.wake, session.id, session.stage, self.spec.name))
                else:
                    after_commit(db, partial(self.clean, session))
        except LostLeaseError:
            return LOST
        return session.state

    def _after(self, stage: Stage, *, went_on: bool) -> None:
        """A stage that ended made room: take what waits for it. A session that goes on to execute left none."""
        try:
            if stage is Stage.EXECUTE or (stage is Stage.PREWARM and not went_on):
                self.look(ready=stage is Stage.EXECUTE)
        except SQLAlchemyError as error:
            # The sweeper asks again.
            logger.warning(line("could not look for work", lane=self.spec.name, error=type(error).__name__))

    def look(self, *, ready: int = 0) -> int:
        """Take queued sessions while there is room; how many. Wake `ready` of those that only lacked room, too."""
        with transaction(self.database) as db:
            for session_id in placement.waiting_to_execute(db, self.spec.name, ready) if ready else ():
                after_commit(db, partial(self.dispatcher.wake, session_id, Stage.EXECUTE, self.spec.name))
            ids = placement.place(db, self.spec.name)
            for session_id in ids:
                after_commit(db, partial(self.dispatcher.wake, session_id, Stage.PREWARM, self.spec.name))
        return len(ids)

    def clean(self, session: RolloutSession) -> None:
        """Remove the runtimes of a session that has ended, and note it."""
        try:
            for handle in session.runtimes.values():
                runtimes.attach(handle).destroy()
        except RuntimeFault as fault:
            # The row still names them: the next beat tries again.
            logger.warning(line("runtime not removed yet", session=session.id, cause=fault.message))
            return
        with transaction(self.database) as db:
            lanes.removed(db, session.id)

    def look_at_engine(self) -> None:
        """Whether the lane's engine answers, and, unless it was probed lately, what it can do; both are kept.

        A lane whose engine is down takes nothing, and looks for work as soon as it is back."""
        down = None
        try:
            if fitness.kept_passport(self.database, self.spec) is None:
                fitness.look(self.database, self.spec)
            else:
                fitness.knock(self.spec)
        except EngineError as error:
            if fitness.is_away(error):
                down = error.message
            else:
                logger.info(line("engine not probed", lane=self.spec.name, cause=error.message))
        self._misses = self._misses + 1 if down else 0
        if 0 < self._misses < DOWN_AFTER:
            return
        with transaction(self.database) as db:
            news = lanes.note_engine(db, self.spec.name, down)
        if news and down:
            logger.warning(line("lane takes nothing: its engine is down", lane=self.spec.name, cause=down))
        elif news:
            logger.info(line("engine is back; lane takes sessions", lane=self.spec.name))
            self.look(ready=self.spec.max_execute)

    def beat(self) -> None:
        """Say that the lane is here."""
        with transaction(self.database) as db:
            lanes.beat(db, self.node, self.spec)

    def tidy(self) -> None:
        """Remove what ended and lost sessions left on this node, and now and then what no session names."""
        with transaction(self.database) as db:
            left, behind = lanes.leftovers(db, self.node.id), lanes.left_behind(db, self.node.id)
        for session in left:
            self.clean(session)
        for leftover in behind:
            try:
                runtimes.attach(leftover.handle).destroy()
            except RuntimeFault as fault:
                logger.warning(line("runtime not removed yet", session=leftover.session_id, cause=fault.message))
                continue
            with transaction(self.database) as db:
                lanes.taken_away(db, leftover.id)
        if time.monotonic() - self.swept_at > SWEEP_SECONDS:
            self.swept_at = time.monotonic()
            orphans.sweep(self.database, self.settings, self.node.id)
