"""`celery -A polar worker -Q gpu0` — a lane at work: the Celery app, and the four stage jobs it runs.

`-Q gpu0` serves the lane whole; `-Q gpu0.execute -c 4` dedicates the worker to one stage. The jobs are the
links of one chain per session; what a stage does, and what surrounds it, stands in `polar/stages/`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from functools import cache
from typing import Any

from celery import Celery, Task, chain
from celery.signals import celeryd_after_setup, setup_logging, worker_ready, worker_shutting_down
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from polar import log, tracing
from polar.db import connect
from polar.dispatch import expand, lane_of, stage_queue
from polar.leases import LeaseKeeper
from polar.lifecycle import STAGES, Stage
from polar.settings import Settings
from polar.stages.runner import Lane
from polar.topology import Topology, load_topology, single_node

SWEEP_QUEUE = "sweep"
NO_QUEUE = "no-lane-named"
BEAT_SECONDS = 5.0
LOOK_SECONDS = 5.0
settings = Settings.load()
logger = logging.getLogger(__name__)

app = Celery("polar", broker=settings.broker_url or "redis://127.0.0.1:6379/0")
app.conf.update(
    worker_pool="threads",
    worker_concurrency=settings.worker_threads,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    task_default_queue=NO_QUEUE,
    # Rows in Postgres are the truth and the sweeper wakes them again: a message need not survive its worker.
    task_acks_late=False,
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        # Nor need the broker remember what a worker took: two transactions with it for each message, for nothing.
        "ack_emulation": False,
        "health_check_interval": 30,
        # A line that is cut says nothing: a connection over it is given up within some fifteen seconds.
        "socket_keepalive": True,
        "socket_keepalive_options": {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3},
        "socket_connect_timeout": 5,
    },
    worker_cancel_long_running_tasks_on_connection_loss=False,
    timezone="UTC",
)


class CeleryDispatcher:
    """Publishes chains and looks; a broker that is away costs nothing but the sweeper's next round."""

    def wake(self, session_id: str, stage: str, lane: str) -> None:
        remaining = STAGES[STAGES.index(Stage(stage)) :]
        links = [JOBS[each].si(session_id, lane).set(queue=stage_queue(lane, each)) for each in remaining]
        self._publish(chain(*links))

    def look(self, lane: str) -> None:
        self._publish(look.si(lane).set(queue=stage_queue(lane, Stage.PREWARM), expires=30))

    def _publish(self, signature: Any) -> None:
        try:
            signature.apply_async(retry=False)
        except app.connection_for_write().connection_errors + app.connection_for_write().channel_errors as error:
            logger.warning(log.line("broker away; the sweeper will wake it", error=type(error).__name__))


@cache
def database() -> Engine:
    return connect(settings.database_url, pool_size=settings.worker_threads)


@cache
def topology() -> Topology:
    if settings.topology:
        return load_topology(settings.topology)
    return single_node(settings.node_id, settings.proxy_port)


@cache
def leases() -> LeaseKeeper:
    return LeaseKeeper(database())


@cache
def lane(name: str) -> Lane:
    node, spec = topology().lane(name)
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Lane(database(), settings, node, spec, CeleryDispatcher(), leases(), worker)


def _run(job: Task, session_id: str, lane_name: str, stage: Stage) -> None:
    if not lane(lane_name).run(session_id, stage):
        job.request.chain = None  # the rest comes with another message; celery's Ignore would cost a traceback each


@app.task(name="polar.prewarm", bind=True)
def prewarm(self: Task, session_id: str, lane_name: str) -> None:
    _run(self, session_id, lane_name, Stage.PREWARM)


@app.task(name="polar.execute", bind=True)
def execute(self: Task, session_id: str, lane_name: str) -> None:
    _run(self, session_id, lane_name, Stage.EXECUTE)


@app.task(name="polar.reconstruct", bind=True)
def reconstruct(self: Task, session_id: str, lane_name: str) -> None:
    _run(self, session_id, lane_name, Stage.RECONSTRUCT)


@app.task(name="polar.evaluate", bind=True)
def evaluate(self: Task, session_id: str, lane_name: str) -> None:
    _run(self, session_id, lane_name, Stage.EVALUATE)


@app.task(name="polar.look")
def look(lane_name: str) -> None:
    lane(lane_name).look()


JOBS = {Stage.PREWARM: prewarm, Stage.EXECUTE: execute, Stage.RECONSTRUCT: reconstruct, Stage.EVALUATE: evaluate}


@setup_logging.connect
def _own_logging(**_: Any) -> None:
    log.configure(settings.log_level, settings.log_format)
    tracing.configure(settings.otel_endpoint, "polar-worker")


@celeryd_after_setup.connect
def _expand_lanes(sender: str, instance: Any, **_: Any) -> None:
    """`-Q gpu0` means the lane's four stage queues; without -Q, the lane of the settings."""
    asked = list(instance.app.amqp.queues.consume_from)
    lanes = [settings.lane if name == NO_QUEUE else name for name in asked if name != SWEEP_QUEUE]
    instance.app.amqp.queues.select(expand(lanes) + [SWEEP_QUEUE] * (SWEEP_QUEUE in asked))


@worker_shutting_down.connect
def _give_back(**_: Any) -> None:
    """A stopped worker ends its agents and gives their sessions back, instead of waiting for them."""
    leases().stop()


@worker_ready.connect
def _start_beating(sender: Any, **_: Any) -> None:
    """Each lane this worker serves says that it is here, and looks for work at once."""
    names = {lane_of(queue) for queue in sender.app.amqp.queues.consume_from if queue != SWEEP_QUEUE}
    if names:
        threading.Thread(target=_beat, args=(sorted(names),), name="lane-beat", daemon=True).start()
        # Apart from the beat: neither an engine that is slow to answer, nor a daemon that is slow to remove what it
        # has, must make its lane look dead.
        threading.Thread(target=_look_at_engines, args=(sorted(names),), name="engine-look", daemon=True).start()
        threading.Thread(target=_tidy, args=(sorted(names),), name="lane-tidy", daemon=True).start()


def _beat(names: list[str]) -> None:
    pause = threading.Event()
    while True:
        # All beat before one looks: a lane that starts with its neighbours must not seem to be the one that is left.
        for name in [name for name in names if _beats(name)]:
            # The sweeper asks, too; but its messages are lost on a node whose wall clock is far from the sweeper's.
            with suppress(SQLAlchemyError):
                lane(name).look()
        pause.wait(BEAT_SECONDS)


def _beats(name: str) -> bool:
    try:
        lane(name).beat()
    except SQLAlchemyError as error:
        logger.warning(log.line("lane could not beat", lane=name, error=type(error).__name__))
        return False
    return True


def _tidy(names: list[str]) -> None:
    """One lane's is enough: what is left over is the node's."""
    pause = threading.Event()
    while True:
        try:
            lane(names[0]).tidy()
        except SQLAlchemyError as error:
            logger.warning(log.line("leftovers not seen", lane=names[0], error=type(error).__name__))
        pause.wait(BEAT_SECONDS)


def _look_at_engines(names: list[str]) -> None:
    pause = threading.Event()
    while True:
        for name in names:
            try:
                lane(name).look_at_engine()
            except SQLAlchemyError as error:
                logger.warning(log.line("engine could not be noted", lane=name, error=type(error).__name__))
        pause.wait(LOOK_SECONDS)
