"""The database work of one Polar fleet without its processes: every transaction of a session's life, by kind.

The statements are Polar's own (`lifecycle`, `placement`, `lanes`, `sweep`, the proxy's reads and recorder); what is
made up is who sends them and the bytes of the model calls. Each kind has its own connections, so that Postgres's CPU
and write-ahead log can be told apart by kind. When each is due is `bench.scale`'s affair.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.orm import Session

from polar import lanes, lifecycle, placement
from polar.db import normal_url, transaction
from polar.lifecycle import Stage
from polar.models import Completion, RolloutSession, TraceRow, TrajectoryRow, now
from polar.proxy.database import Database, compiled
from polar.proxy.sessions import FIND
from polar.proxy.statements import arguments, statement
from polar.spec import TaskRequest, parse_task
from polar.sweep import sweep
from polar.topology import EngineSpec, LaneSpec, NodeSpec

INSTRUCTION_BYTES, REQUEST_BYTES, PARSED_BYTES = 4_000, 3_000, 1_000
PROMPT_TOKENS, OUTPUT_TOKENS = 500, 200
"""Of one call: what is new in the prompt, and what is sampled."""
PATIENCE = 30.0
"""Seconds that a statement may take."""


@dataclass
class Virtual:
    """A session as the simulation follows it."""

    row: RolloutSession
    calls: int = 0
    attempt: int = 1
    completion: str = ""
    key_hash: bytes = b""


@dataclass
class Looks:
    """A dispatcher that only remembers which lanes were asked to look."""

    lanes: list[str] = field(default_factory=list)

    def wake(self, session_id: str, stage: str, lane: str) -> None:
        """A message, in a fleet."""

    def look(self, lane: str) -> None:
        """A lane is asked."""
        self.lanes.append(lane)


class Work:
    """One kind's connections, made by its threads as they need them."""

    def __init__(self, url: str, kind: str, threads: int) -> None:
        self.kind = kind
        self._url = url
        arguments = {"application_name": kind}
        self.engine: Engine = create_engine(
            normal_url(url), pool_size=threads, max_overflow=0, pool_pre_ping=True, connect_args=arguments
        )
        self._own = threading.local()

    def rows(self, said: str, values: Sequence[Any]) -> list[Any]:
        """What a statement finds over this thread's connection as the proxy has it."""
        if not hasattr(self._own, "database"):
            self._own.loop = asyncio.new_event_loop()
            self._own.database = Database(f"{self._url}?application_name={self.kind}", 1)
        found: list[Any] = self._own.loop.run_until_complete(self._own.database.patiently(said, values, PATIENCE))
        return found

    def record(self, kind: str, row: dict[str, Any]) -> list[Any]:
        """Write one record, in a statement of its own, as the proxy's recorder does with a batch of one."""
        return self.rows(statement((kind,)), list(arguments(kind, [row])))

    def transaction(self) -> AbstractContextManager[Session]:
        return transaction(self.engine)


def task_request(name: str, sessions: int) -> TaskRequest:
    """A task with a long instruction."""
    return parse_task(
        {
            "task_id": name,
            "instruction": os.urandom(INSTRUCTION_BYTES // 2).hex(),
            "num_samples": sessions,
            "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
            "runtime": {"backend": "local"},
            "evaluator": {"strategy": "session_completed"},
        }
    )


def node_and_lane(number: int, max_execute: int) -> tuple[NodeSpec, LaneSpec]:
    """One of the fleet's nodes; its lane stands for all its GPUs."""
    lane = LaneSpec(
        name=f"node{number}.gpu0",
        engine=EngineSpec(base_url="http://127.0.0.1:1"),
        max_execute=max_execute,
        ready_buffer=8,
    )
    return NodeSpec(id=f"node{number}", lanes=(lane,)), lane


def claim(work: Work, session_id: str, stage: Stage, worker: str) -> RolloutSession | None:
    """A stage begins."""
    with work.transaction() as db:
        session = lifecycle.claim(db, session_id, stage, worker)
        if session is not None:
            _ = session.task.spec
        return session


def advance(work: Work, virtual: Virtual) -> None:
    """A stage ends."""
    values: dict[str, Any] = {}
    if virtual.row.stage == Stage.EXECUTE:
        values = {"agent_exit": {"state": "completed", "exit_code": 0, "error": None, "detail": {}}, "key_hash": None}
    if virtual.row.stage == Stage.EVALUATE:
        values = {"reward": 1.0, "verdict": {"strategy": "session_completed", "outcome_reward": 1.0}}
    with work.transaction() as db:
        lifecycle.advance(db, db.merge(virtual.row, load=False), **values)


def keep(work: Work, virtual: Virtual) -> None:
    """What a stage writes in its middle: a runtime's handle, a key, a trajectory."""
    stage = Stage(virtual.row.stage)
    with work.transaction() as db:
        row = lifecycle.held_row(db, virtual.row)
        if stage in lifecycle.BEFORE_RECONSTRUCT:
            spec = {"backend": "local", "env": {}, "prepare": [], "kwargs": {}, "gpus": 0, "network": None}
            workspace = f"/data/polar/workspaces/{row.id}/agent-1"
            row.runtimes = {"agent": {"runtime": "local", "spec": spec, "session_id": row.id, "workspace": workspace}}
        if stage is Stage.EXECUTE:
            virtual.key_hash = row.key_hash = hashlib.sha256(row.id.encode()).digest()
        if stage is Stage.RECONSTRUCT:
            tokens = 30 * (PROMPT_TOKENS + OUTPUT_TOKENS)
            ids = os.urandom(4 * tokens)
            db.add(TrajectoryRow(session_id=row.id, attempt=1, builder="prefix_merging", meta={"record_count": 30}))
            arrays = {"prompt_ids": ids[:400], "response_ids": ids, "loss_mask": ids[:tokens], "logprobs": ids}
            body, certificate = os.urandom(REQUEST_BYTES), {"flags": [], "fidelity": "exact"}
            db.add(
                TraceRow(session_id=row.id, number=0, **arrays, fidelity="exact", certificate=certificate, body=body)
            )


def clean(work: Work, virtual: Virtual) -> None:
    """The runtimes of an ended session are gone."""
    with work.transaction() as db:
        lanes.removed(db, virtual.row.id)


def place(work: Work, lane: str) -> list[str]:
    """A lane looks."""
    with work.transaction() as db:
        return placement.place(db, lane)


def renew(work: Work, held: list[tuple[str, int]]) -> int:
    """A worker's heartbeat: all its leases."""
    with work.transaction() as db:
        return len(lifecycle.renew(db, held))


def beat(work: Work, node: NodeSpec, lane: LaneSpec) -> None:
    """A lane says that it is here, and looks for what was left behind."""
    with work.transaction() as db:
        lanes.beat(db, node, lane)
        lanes.leftovers(db, node.id)


def swept(work: Work) -> list[str]:
    """A round of the sweeper; the lanes that it asks to look."""
    looks = Looks()
    sweep(work.engine, looks)
    return looks.lanes


def find(work: Work, virtual: Virtual) -> None:
    """The query that each model call begins with."""
    query = compiled(FIND)
    if not work.rows(query.text, query.arguments({"key_hash": virtual.key_hash})):
        raise RuntimeError(f"the key of {virtual.row.id} is not known")


def intend(work: Work, virtual: Virtual) -> None:
    """A call is about to be made."""
    work.record("intent", _intent(virtual))


def in_flight(engine: Engine, calling: Sequence[Virtual]) -> None:
    """The calls of sessions that are in the middle of one, as the moments before would have made them."""
    nothing = {"output_ids": b"", "policy_versions": [], "engine": {}, "delivered": False}
    for start in range(0, len(calling), 500):
        with transaction(engine) as db:
            db.execute(insert(Completion), [{**_intent(each), **nothing} for each in calling[start : start + 500]])


def _intent(virtual: Virtual) -> dict[str, Any]:
    parent, virtual.completion = virtual.completion, f"cmp-{uuid.uuid4().hex[:24]}"
    row: dict[str, Any] = {"id": virtual.completion, "session_id": virtual.row.id, "attempt": 1, "outcome": "asked"}
    row |= {"parent_id": parent or None, "parent_reason": "continues", "dialect": "openai_chat", "role": "main"}
    row |= {"request": os.urandom(REQUEST_BYTES), "parsed": {"asked": os.urandom(PARSED_BYTES // 4).hex()}}
    row |= {"context_len": 2 * virtual.calls, "prompt_len": 700 * virtual.calls, "flags": [], "requested_at": now()}
    return {**row, "model_requested": "", "suffix_ids": os.urandom(4 * PROMPT_TOKENS)}


def settle(work: Work, virtual: Virtual) -> None:
    """A call ended; its session is charged in the same statement."""
    virtual.calls += 1
    row: dict[str, Any] = {"id": virtual.completion, "outcome": "answered", "model_used": "policy"}
    row |= {"parsed": {"message": os.urandom(PARSED_BYTES // 4).hex()}, "chain_hash": os.urandom(16), "flags": []}
    row |= {"output_ids": os.urandom(4 * OUTPUT_TOKENS), "logprobs": os.urandom(4 * OUTPUT_TOKENS)}
    row |= {"finish_reason": "stop", "policy_versions": [{"version": "1", "start": 0, "end": OUTPUT_TOKENS}]}
    row |= {"engine": {"name": "sglang", "ms": 3000, "tries": 1}, "prompt_verified": True, "finished_at": now()}
    row |= {"session_id": virtual.row.id, "attempt": virtual.row.attempt, "key_hash": virtual.key_hash}
    if not work.record("settle", {**row, "turns": 1, "tokens": OUTPUT_TOKENS}):
        raise RuntimeError(f"session {virtual.row.id} moved on while it was called for")


def deliver(work: Work, virtual: Virtual) -> None:
    """A harness received its answer whole."""
    work.record("delivered", {"id": virtual.completion})


SESSION_WORK: dict[str, Callable[[Work, Virtual], None]] = {
    "find": find,
    "intent": intend,
    "settle": settle,
    "delivered": deliver,
    "keep": keep,
    "advance": advance,
    "clean": clean,
}
"""What is done for one session, by kind."""


def set_running(engine: Engine, ids: list[str]) -> None:
    """These sessions are in the middle of their agents' runs, as the day would have made them."""
    with engine.begin() as db:
        moved = text(
            """
            UPDATE sessions SET stage = 'execute', state = 'running', worker = 'node', execute_attempt = 1,
                claimed_at = now(), lease_until = now() + interval '1 day', deadline_at = now() + interval '1 day',
                key_hash = sha256(id::bytea), runtimes = '{"agent": {"runtime": "local", "workspace": "/data"}}'
            WHERE id = ANY(:ids)
            """
        )
        db.execute(moved, {"ids": ids})
