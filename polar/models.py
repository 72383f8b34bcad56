"""The tables. Columns and keys only: who may change what is `lifecycle`'s affair.

Token ids are little-endian int32 in bytea, log-probabilities float32: numpy reads them without a copy.
Times are UTC, and the database's: `now` is `clock`'s. Texts of requests and answers are zstd-compressed JSON.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Computed,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from polar.clock import now

TAKEN = text("sessions.ended_at IS NULL AND (sessions.lane IS NOT NULL OR sessions.deadline_at IS NOT NULL)")
"""Sessions that a lane has, or had: few, however many wait. Said in these words, Postgres knows the index to take."""


class Model(DeclarativeBase):
    type_annotation_map = {
        str: Text(),
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB(),
        list[Any]: JSONB(),
        bytes: LargeBinary(),
    }


class Task(Model):
    """What a trainer asked for. `task_id` is the trainer's name; a finished name may be used again."""

    __tablename__ = "tasks"
    __table_args__ = (
        Index("tasks_current_name", "task_id", unique=True, postgresql_where=text("current")),
        Index("tasks_recent", "created_at"),
        Index("tasks_name", "task_id"),
        Index("tasks_in_order", text("priority DESC"), "created_at", postgresql_where=text("ended_at IS NULL")),
        Index("tasks_open", "key_id", postgresql_where=text("ended_at IS NULL")),
        Index("tasks_group", "group_id", postgresql_where=text("group_id IS NOT NULL")),
        Index("tasks_repeated", "idempotency_key", postgresql_where=text("idempotency_key IS NOT NULL")),
        # Of the pages: each filter and order of a list that goes on from where the last page ended.
        Index("tasks_by_name", text('(task_id COLLATE "C")'), "id"),
        Index("tasks_by_state", "state", "created_at", "id"),
        Index("tasks_by_harness", text("(spec->'agent'->>'harness')"), "created_at", "id"),
        Index("tasks_by_evaluator", text("(spec->'evaluator'->>'strategy')"), "created_at", "id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    task_id: Mapped[str]
    current: Mapped[bool] = mapped_column(default=True)
    """False once a later task took the same name."""
    state: Mapped[str]
    spec: Mapped[dict[str, Any]]
    priority: Mapped[int] = mapped_column(default=0)
    num_samples: Mapped[int]
    error: Mapped[str | None]
    key_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("api_keys.id", ondelete="SET NULL"))
    """The API key that submitted it; None where the API asks for no key."""
    idempotency_key: Mapped[str | None]
    group_id: Mapped[str | None]
    """`metadata.group_id` as text, where an index finds it."""
    lanes: Mapped[list[Any] | None] = mapped_column(Computed("nullif(spec -> 'lanes', 'null'::jsonb)", persisted=True))
    """`lanes` of the spec, where placement reads it without the rest of a long spec; None: any lane."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    updated_at: Mapped[datetime] = mapped_column(default=now)
    ended_at: Mapped[datetime | None]
    sessions: Mapped[list[RolloutSession]] = relationship(back_populates="task", order_by="RolloutSession.number")


class RolloutSession(Model):
    """One attempt at a task. `stage` says where, `state` says how."""

    __tablename__ = "sessions"
    __table_args__ = (
        Index("sessions_of_task", "task_pk", "number"),
        Index("sessions_unended", "task_pk", "number", postgresql_where=text("ended_at IS NULL")),
        Index(
            "sessions_taken",
            "lane",
            "stage",
            "state",
            postgresql_where=text("ended_at IS NULL AND (lane IS NOT NULL OR deadline_at IS NOT NULL)"),
        ),
        Index("sessions_key", "key_hash", unique=True, postgresql_where=text("key_hash IS NOT NULL")),
        Index("sessions_leftover", "node_id", postgresql_where=text("runtimes <> '{}'::jsonb")),
        Index("sessions_feed", "feed_number", unique=True, postgresql_where=text("feed_number IS NOT NULL")),
        Index(
            "sessions_unnumbered",
            "ended_at",
            "id",
            postgresql_where=text("ended_at IS NOT NULL AND feed_number IS NULL"),
        ),
        Index("sessions_newest", "created_at", "id"),
        Index(
            "sessions_ended_as",
            "state",
            "ended_at",
            "id",
            postgresql_include=["reward", "sampled_tokens"],
            postgresql_where=text("ended_at IS NOT NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    task_pk: Mapped[uuid.UUID] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"))
    number: Mapped[int]
    """0-based place among the task's sessions."""
    stage: Mapped[str]
    state: Mapped[str]
    priority: Mapped[int] = mapped_column(default=0)
    attempt: Mapped[int] = mapped_column(default=1)
    """The fence: goes up with each retry; a write that names an older one matches no row."""
    stage_attempts: Mapped[int] = mapped_column(default=1)
    execute_attempt: Mapped[int | None]
    """Whose completions count: the attempt that ran the agent last."""
    lane: Mapped[str | None]
    node_id: Mapped[str | None]
    worker: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    woken_at: Mapped[datetime | None]
    queued_at: Mapped[datetime] = mapped_column(default=now)
    claimed_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    key_hash: Mapped[bytes | None]
    """SHA-256 of the proxy key of the attempt that is executing; None when no agent may call."""
    runtimes: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Handles of what must be removed when the session ends: {"agent": {...}, "evaluator": {...}}."""
    agent_exit: Mapped[dict[str, Any] | None]
    """How execute went: {state, exit_code, error, ...}."""
    verdict: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]
    """{stage, blame, code, message} of what ended the session."""
    reward: Mapped[float | None]
    turns: Mapped[int] = mapped_column(default=0)
    sampled_tokens: Mapped[int] = mapped_column(default=0)
    timing: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Milliseconds: {stage: {"queued_ms": …, "run_ms": …}}."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    ended_at: Mapped[datetime | None]
    feed_number: Mapped[int | None] = mapped_column(BigInteger)
    """Place in the results feed, given after the end is committed; who gives it is `delivery.feed`'s affair."""
    task: Mapped[Task] = relationship(back_populates="sessions")


class SessionEvent(Model):
    """One move, never changed: the session's story in order."""

    __tablename__ = "session_events"
    __table_args__ = (Index("events_of_session", "session_id", "id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(default=now)
    move: Mapped[str]
    stage: Mapped[str]
    state: Mapped[str]
    attempt: Mapped[int]
    worker: Mapped[str | None]
    note: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Completion(Model):
    """One captured model call. Prompt ids = the parent's prompt and output ids + `suffix_ids`."""

    __tablename__ = "completions"
    __table_args__ = (Index("completions_of_session", "session_id", "attempt", "seq"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, Identity())
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    outcome: Mapped[str]
    """asked, answered, aborted or failed; `asked` is written before the engine is called."""
    parent_id: Mapped[str | None]
    parent_reason: Mapped[str]
    dialect: Mapped[str]
    role: Mapped[str] = mapped_column(default="main")
    model_requested: Mapped[str]
    model_used: Mapped[str | None]
    request: Mapped[bytes]
    answer: Mapped[bytes | None]
    parsed: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Asked sampling, marks, and the served assistant message: what builders read."""
    chain_hash: Mapped[bytes | None]
    """Names the conversation including the served answer; the ledger finds parents by it."""
    context_len: Mapped[int] = mapped_column(default=0)
    """Messages in the request."""
    prompt_len: Mapped[int] = mapped_column(default=0)
    suffix_ids: Mapped[bytes] = mapped_column(default=b"")
    output_ids: Mapped[bytes] = mapped_column(default=b"")
    logprobs: Mapped[bytes | None]
    finish_reason: Mapped[str | None]
    policy_versions: Mapped[list[Any]] = mapped_column(default=list)
    """Spans over the output: [{"version": …, "start": …, "end": …}]."""
    prompt_verified: Mapped[bool | None]
    """Whether the engine saw exactly these prompt ids; None where it does not say."""
    flags: Mapped[list[Any]] = mapped_column(default=list)
    engine: Mapped[dict[str, Any]] = mapped_column(default=dict)
    error: Mapped[dict[str, Any] | None]
    requested_at: Mapped[datetime] = mapped_column(default=now)
    finished_at: Mapped[datetime | None]
    delivered: Mapped[bool] = mapped_column(default=False)


class Media(Model):
    """A picture that a harness sent, stored once however often it was sent."""

    __tablename__ = "media"

    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the bytes, in hexadecimal."""
    media_type: Mapped[str]
    data: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(default=now)


class TrajectoryRow(Model):
    """A session's completions, put together."""

    __tablename__ = "trajectories"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int]
    builder: Mapped[str]
    meta: Mapped[dict[str, Any]] = mapped_column(default=dict)
    error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(default=now)


class TraceRow(Model):
    """One token stream of a trajectory."""

    __tablename__ = "traces"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    prompt_ids: Mapped[bytes]
    response_ids: Mapped[bytes]
    loss_mask: Mapped[bytes]
    """One byte a token, 1 = sampled."""
    logprobs: Mapped[bytes | None]
    reward: Mapped[float | None]
    weight: Mapped[float] = mapped_column(default=1.0)
    trainable: Mapped[bool] = mapped_column(default=False)
    fidelity: Mapped[str]
    certificate: Mapped[dict[str, Any]] = mapped_column(default=dict)
    body: Mapped[bytes]
    """prompt_messages, response_messages, tools, finish_reason, metadata."""


class Node(Model):
    """A machine with a proxy and workers."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    gateway_url: Mapped[str]
    draining: Mapped[bool] = mapped_column(default=False)
    heartbeat_at: Mapped[datetime] = mapped_column(default=now)
    created_at: Mapped[datetime] = mapped_column(default=now)


class Lane(Model):
    """A GPU-pinned queue of a node with the engine it talks to."""

    __tablename__ = "lanes"

    name: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"))
    engine: Mapped[dict[str, Any]]
    """The lane's entry of the topology."""
    max_execute: Mapped[int]
    ready_buffer: Mapped[int]
    max_evaluate: Mapped[int] = mapped_column(default=4)
    passport: Mapped[dict[str, Any]] = mapped_column(default=dict)
    heartbeat_at: Mapped[datetime] = mapped_column(default=now)
    engine_down_since: Mapped[datetime | None]
    """Set while its engine does not answer: then the lane takes nothing."""
    engine_error: Mapped[str | None]
    """What was found instead of an answer."""


class Leftover(Model):
    """A runtime of a session that was moved to another node: removed by its own node, when that is there again."""

    __tablename__ = "leftovers"
    __table_args__ = (Index("leftovers_of_node", "node_id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    session_id: Mapped[str]
    node_id: Mapped[str]
    handle: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Policy(Model):
    """The model being trained, as the trainer says, and the gate before every generation: one row or none yet."""

    __tablename__ = "policy"
    __table_args__ = (CheckConstraint("id = 1", name="policy_is_one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, default=1)
    name: Mapped[str | None]
    version: Mapped[str | None]
    max_staleness: Mapped[int | None]
    """Versions that a trained token may be behind; None: any number."""
    gate: Mapped[str] = mapped_column(default="open")
    epoch: Mapped[int] = mapped_column(BigInteger, default=0)
    """Goes up with every change of this row: of two readings, the later one has more."""
    closed_at: Mapped[datetime | None]
    """When the gate closed, by the database's clock; None while it is open."""
    closed_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """How long it was closed in all, but for the pause that goes on now."""
    updated_at: Mapped[datetime] = mapped_column(default=now)


class WeightPush(Model):
    """One lane's part of a weight push. Its clock is the database's."""

    __tablename__ = "weight_pushes"
    __table_args__ = (
        Index("weight_pushes_unfinished", "node_id", postgresql_where=text("state IN ('queued', 'running')")),
    )

    push_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    lane: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str]
    version: Mapped[str]
    path: Mapped[str]
    """Of the checkpoint, as the engine's machine sees it."""
    probe: Mapped[dict[str, Any] | None]
    """What the new weights have to score, and how: {"prompt_ids", "output_ids", "logprobs"}."""
    state: Mapped[str]
    error: Mapped[str | None]
    difference: Mapped[float | None]
    """Mean absolute difference of the probe's log-probabilities."""
    seconds: Mapped[float | None]
    claimed_by: Mapped[str | None]
    claimed_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    ended_at: Mapped[datetime | None]


class Proxy(Model):
    """One process of a node's proxy, as it said at its last heartbeat. Its clock is the database's."""

    __tablename__ = "proxies"

    id: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str]
    epoch: Mapped[int] = mapped_column(BigInteger)
    """Of the policy's row that it acts on."""
    in_flight: Mapped[int]
    """Calls at an engine."""
    held: Mapped[int]
    """Calls that wait at the gate."""
    drained: Mapped[int]
    """Calls that ended while the gate was closing, since it last closed."""
    aborted: Mapped[int]
    """Calls that were cut then, and wait to go on."""
    started_at: Mapped[datetime] = mapped_column(default=now)
    heartbeat_at: Mapped[datetime] = mapped_column(default=now)


class ApiKey(Model):
    """A key of the REST API and the pages; only its hash is kept."""

    __tablename__ = "api_keys"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    name: Mapped[str]
    key_hash: Mapped[bytes] = mapped_column(unique=True)
    scopes: Mapped[list[Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)
    revoked_at: Mapped[datetime | None]


class Delivery(Model):
    """A webhook that is owed: kept until acknowledged or expired. Of a session if it names one, else of its task."""

    __tablename__ = "deliveries"
    __table_args__ = (Index("deliveries_due", "next_at", postgresql_where=text("ended_at IS NULL")),)

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    task_pk: Mapped[uuid.UUID] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"))
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    url: Mapped[str]
    attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[datetime] = mapped_column(default=now)
    acknowledged: Mapped[bool] = mapped_column(default=False)
    last_error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(default=now)
    ended_at: Mapped[datetime | None]


class Feed(Model):
    """The end of the results feed: one row or none yet. Whoever numbers sessions holds it."""

    __tablename__ = "feed"
    __table_args__ = (CheckConstraint("id = 1", name="feed_is_one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, default=1)
    last: Mapped[int] = mapped_column(BigInteger, default=0)
    """The highest number that was given."""


class Consumer(Model):
    """A named reader of the results feed, and how far it has acknowledged."""

    __tablename__ = "consumers"

    name: Mapped[str] = mapped_column(primary_key=True)
    cursor: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(default=now)
    updated_at: Mapped[datetime] = mapped_column(default=now)


class Beat(Model):
    """A round that is made again and again, such as the sweeper's, and when it was made last."""

    __tablename__ = "beats"

    name: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(default=now)
