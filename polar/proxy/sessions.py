"""Whose key this is: the one query that every call begins with.

Nothing is cached, so a key is dead in the moment its session moves on. Keys are only ever seen as hashes.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Float, bindparam, cast, func, select, true

from polar.lifecycle import SESSION_CLOCK, Stage, State
from polar.models import Lane, Policy, RolloutSession, Task
from polar.proxy.gate import PolicyNow, policy_of
from polar.proxy.reads import Reads


@dataclass(frozen=True, slots=True)
class Caller:
    """The executing session behind a key, as one call needs to know it."""

    id: str
    attempt: int
    key_hash: bytes
    left: float | None
    """Seconds that its session had when this was read, not counting pauses; None: as many as it takes."""
    turns: int
    sampled_tokens: int
    sampling: dict[str, Any]
    max_turns: int | None
    max_session_tokens: int | None
    model_name: str | None
    harness: str | None
    other_models: str | None
    lane: str | None
    engine: dict[str, Any] | None
    """The lane's EngineSpec; None if the lane is not registered."""
    policy: PolicyNow
    """As it is while this call begins."""
    history: str = "sampled"
    """The task's history policy."""
    strict: bool = False
    """The task takes no trace that is not exact."""
    read_at: float = field(default_factory=time.monotonic)
    logprob_kind: str | None = None
    """Of which distribution the lane's engine gives log-probabilities, as its passport has it."""
    task: str | None = None
    """The trainer's name of the task."""

    def serves(self, model: str) -> bool:
        """Whether a call for a model of this name is answered: by default any is, and always by the policy."""
        return self.other_models != "refuse" or model == self.model_name


FIND = (
    select(
        RolloutSession.id,
        RolloutSession.attempt,
        RolloutSession.key_hash,
        cast(func.extract("epoch", RolloutSession.deadline_at - SESSION_CLOCK), Float).label("left"),
        RolloutSession.turns,
        RolloutSession.sampled_tokens,
        Task.task_id.label("task"),
        Task.spec["sampling"].label("sampling"),
        Task.spec["max_turns"].label("max_turns"),
        Task.spec["max_session_tokens"].label("max_session_tokens"),
        Task.spec["agent"]["model_name"].label("model_name"),
        func.coalesce(Task.spec["agent"]["harness"].as_string(), Task.spec["agent"]["import_path"].as_string()).label(
            "harness"
        ),
        Task.spec["agent"]["other_models"].label("other_models"),
        func.coalesce(Task.spec["history"].as_string(), "sampled").label("history"),
        func.coalesce(Task.spec["strict"].as_boolean(), False).label("strict"),
        RolloutSession.lane,
        Lane.engine,
        Lane.passport["logprobs"].as_string().label("logprob_kind"),
        Policy.version,
        Policy.gate,
        Policy.epoch,
    )
    .join(Task, Task.id == RolloutSession.task_pk)
    .outerjoin(Lane, Lane.name == RolloutSession.lane)
    .outerjoin(Policy, true())
    .where(
        RolloutSession.key_hash == bindparam("key_hash"),
        RolloutSession.state == State.RUNNING,
        RolloutSession.stage == Stage.EXECUTE,
    )
)


async def find_caller(reads: Reads, key: str) -> Caller | None:
    """The session that this key speaks for; None if it is unknown or no longer executing."""
    found = await reads.all(FIND, key_hash=hashlib.sha256(key.encode()).digest())
    if not found:
        return None
    values = dict(found[0])
    policy = policy_of(*(values.pop(name) for name in ("version", "gate", "epoch")))
    return Caller(**{**values, "sampling": values["sampling"] or {}, "policy": policy})
