"""One stage of one session, from claim to move: what surrounds every stage, and no stage mentions.

Claim, lease, budget, the classification of errors, and the guarded move. Publishing is the dispatcher's.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Engine

from polar import lanes, lifecycle, placement, runtimes, tracing
from polar.db import AWAY, after_commit, patiently, transaction
from polar.dispatch import Dispatcher
from polar.errors import EngineError, LostLeaseError, NodeError, SessionError
from polar.leases import LeaseKeeper
from polar.lifecycle import Stage, State
from polar.log import line
from polar.models import RolloutSession
from polar.settings import Settings
from polar.spec import TaskRequest
from polar.stages import STAGE_RUNS, fitness
from polar.stages.base import Job, Outcome
from polar.topology import LaneSpec, NodeSpec

logger = logging.getLogger(__name__)
LOST = "lost"
"""In place of a state: somebody else moved the session on, and this worker cannot say how it does."""
MOVE_SECONDS = 60.0
"""How long a database that is away is waited for before a stage that is done is given up, and done again by others."""


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

    def run(self, session_id: str, stage: Stage) -> bool:
        """Do one stage; True if the session went on to the next, so that its chain may go on."""
        if self.leases.stopping.is_set():
            return False
        with transaction(self.database) as db:
            session = lifecycle.claim(db, session_id, stage, self.worker)
            if session is None:
                return False
            task = TaskRequest.model_validate(session.task.spec)
        started = time.monotonic()
        with self.leases.hold(session.id, session.attempt) as lost:
            job = Job(session, task, self.database, self.settings, self.node, self.spec, lost)
            says, state, error = "", LOST, None
            try:
                outcome = STAGE_RUNS[stage](job)
                says = outcome.says
                state = patiently(partial(self._advance, job, outcome), MOVE_SECONDS)
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
                state = patiently(partial(self._failed, job, error), MOVE_SECONDS)
        self._tell(job, stage, state, time.monotonic() - started, says, error)
        try:
            self._after(stage)
        except AWAY as failure:  # what waits for room is woken by the sweeper
            logger.warning(line("no look for waiting sessions", lane=self.spec.name, error=type(failure).__name__))
        return error is None and state != LOST

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
            with suppress(LostLeaseError), transaction(self.database) as db:
                lifecycle.release(db, db.merge(job.session, load=False))
        return LOST

    def _failed(self, job: Job, error: SessionError) -> str:
        """How the session does then."""
        if self.leases.stopping.is_set():
            return self._lost(job)
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

    def _after(self, stage: Stage) -> None:
        """A stage that ended made room: take what waits for it."""
        if stage in lifecycle.BEFORE_RECONSTRUCT:
            if stage is Stage.EXECUTE:
                with transaction(self.database) as db:
                    waiting = placement.waiting_to_execute(db, self.spec.name)
                for session_id in waiting:
                    self.dispatcher.wake(session_id, Stage.EXECUTE, self.spec.name)
            self.look()

    def look(self) -> int:
        """Take queued sessions while there is room; how many."""
        with transaction(self.database) as db:
            ids = placement.place(db, self.spec.name)
            for session_id in ids:
                after_commit(db, partial(self.dispatcher.wake, session_id, Stage.PREWARM, self.spec.name))
        return len(ids)

    def clean(self, session: RolloutSession) -> None:
        """Remove the runtimes of a session that has ended, and note it."""
        for handle in session.runtimes.values():
            runtimes.attach(handle).destroy()
        with transaction(self.database) as db:
            lanes.removed(db, session.id)

    def look_at_engine(self) -> None:
        """Probe the lane's engine, unless that was done lately; what is found is kept with the lane."""
        if fitness.kept_passport(self.database, self.spec) is None:
            try:
                fitness.look(self.database, self.spec)
            except EngineError as error:
                logger.info(line("engine not probed", lane=self.spec.name, cause=error.message))

    def beat(self) -> None:
        """Say that the lane is here, and remove what ended sessions left on this node."""
        with transaction(self.database) as db:
            lanes.beat(db, self.node, self.spec)
            left = lanes.leftovers(db, self.node.id)
        for session in left:
            self.clean(session)
