"""What Polar's REST API says and is told, as plain values: no pydantic, and nothing of the server.

Every value keeps the JSON that it was read from in `raw`, so a field that this version does not know is not lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

Json = dict[str, Any]
ENDED = frozenset({"completed", "failed", "cancelled"})
"""States in which a task has ended."""


class Task(TypedDict, total=False):
    """What a trainer posts. `task_id`, `instruction` and `agent` are required; the server checks every field."""

    task_id: str
    instruction: str
    num_samples: int
    timeout_seconds: float
    runtime: Mapping[str, Any] | None
    agent: Mapping[str, Any]
    builder: Mapping[str, Any]
    evaluator: Mapping[str, Any] | None
    callback_url: str | None
    callback_events: list[str]
    metadata: Mapping[str, Any]
    dispatch_priority: int
    early_stop_min_usable_sessions: int | None
    agent_timeout_seconds: float | None
    sampling: Mapping[str, Any]
    max_turns: int | None
    max_session_tokens: int | None
    max_staleness: int | None
    history: str
    strict: bool
    lanes: list[str] | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer to a submit."""

    task_id: str
    status: str
    duplicate: bool = False
    """The same Idempotency-Key had been sent before; nothing was started now."""

    @classmethod
    def read(cls, raw: Json) -> Accepted:
        return cls(raw["task_id"], raw["status"], bool(raw.get("duplicate", False)))


@dataclass(frozen=True, slots=True)
class Trace:
    """One token stream. In a summary the arrays are empty and the counts tell their lengths."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    """1 where the token was sampled by the policy."""
    logprobs: list[float] | None
    """Beside `response_ids`, 0.0 where the mask is 0; None if a sampled token lacks one."""
    reward: float | None
    trainable: bool
    weight: float
    """1 / number of the session's trainable traces."""
    fidelity: str
    finish_reason: str | None
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    raw: Json = field(repr=False)

    @classmethod
    def read(cls, raw: Json) -> Trace:
        prompt, response, mask = (raw.get(name) or [] for name in ("prompt_ids", "response_ids", "loss_mask"))
        return cls(
            prompt_ids=prompt,
            response_ids=response,
            loss_mask=mask,
            logprobs=raw.get("response_logprobs"),
            reward=raw.get("reward"),
            trainable=bool(raw.get("trainable", True)),
            weight=float(raw.get("weight", 1.0)),
            fidelity=str(raw.get("fidelity", "unverified")),
            finish_reason=raw.get("finish_reason"),
            prompt_tokens=raw.get("prompt_tokens", len(prompt)),
            response_tokens=raw.get("response_tokens", len(response)),
            sampled_tokens=raw["sampled_tokens"] if "sampled_tokens" in raw else sum(mask),
            raw=raw,
        )

    @property
    def metadata(self) -> Json:
        return self.raw.get("metadata") or {}

    @property
    def certificate(self) -> Json:
        """What the trace vouches for: flags, policy versions, first difference."""
        return self.metadata.get("certificate") or {}

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(self.certificate.get("flags") or ())

    @property
    def policy_versions(self) -> list[Json]:
        """Spans {version, start, end} over the response."""
        return list(self.certificate.get("policy_versions") or [])

    @property
    def messages(self) -> list[Json]:
        """The conversation, prompt and response together."""
        return [*(self.raw.get("prompt_messages") or []), *(self.raw.get("response_messages") or [])]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All of a session's completions, put together."""

    status: str
    metadata: Json
    traces: list[Trace]
    error: str | None

    @classmethod
    def read(cls, raw: Json) -> Trajectory:
        traces = [Trace.read(each) for each in raw.get("traces") or []]
        return cls(raw["status"], raw.get("metadata") or {}, traces, raw.get("error"))


@dataclass(frozen=True, slots=True)
class SessionResult:
    """How one session came out."""

    session_id: str
    task_id: str
    status: str
    """COMPLETED, TIMEOUT or ERROR, as the original says it."""
    trajectory: Trajectory
    error: str | None
    metadata: Json
    """Stage, state, attempt, lane, turns, reward, timings of the stages."""
    cursor: str | None
    """Of a reader of the feed who has this result; None outside the feed."""
    raw: Json = field(repr=False)

    @classmethod
    def read(cls, raw: Json) -> SessionResult:
        return cls(
            session_id=raw["session_id"],
            task_id=raw["task_id"],
            status=raw["status"],
            trajectory=Trajectory.read(raw["trajectory"]),
            error=raw.get("error"),
            metadata=raw.get("metadata") or {},
            cursor=raw.get("cursor"),
            raw=raw,
        )

    @property
    def traces(self) -> list[Trace]:
        return self.trajectory.traces

    @property
    def reward(self) -> float | None:
        """The session's reward; None if no evaluator gave one."""
        found: float | None = self.metadata.get("reward")
        return found

    @property
    def task_metadata(self) -> Json:
        """`metadata` of the task, as it was submitted."""
        return self.trajectory.metadata.get("task_metadata") or {}


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """How a task is doing, with the results of the sessions that have ended."""

    task_id: str
    status: str
    results: list[SessionResult]
    total_sessions: int
    completed_sessions: int
    raw: Json = field(repr=False)

    @classmethod
    def read(cls, raw: Json) -> TaskStatus:
        results = [SessionResult.read(each) for each in raw.get("results") or []]
        return cls(raw["task_id"], raw["status"], results, raw["total_sessions"], raw["completed_sessions"], raw)

    @property
    def ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class SessionState:
    """Where a session is and how it is doing there."""

    session_id: str
    task_id: str
    stage: str
    state: str
    attempt: int
    lane: str | None
    reward: float | None
    turns: int
    sampled_tokens: int
    error: str | None
    raw: Json = field(repr=False)

    @classmethod
    def read(cls, raw: Json) -> SessionState:
        names = ("session_id", "task_id", "stage", "state", "attempt", "lane", "reward", "turns", "sampled_tokens")
        return cls(**{name: raw[name] for name in names}, error=raw.get("error"), raw=raw)


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy, its staleness bound, and the gate of every node."""

    name: str | None
    version: int | str | None
    max_staleness: int | None
    gate: str
    """open, drain or abort."""
    raw: Json = field(repr=False)

    @classmethod
    def read(cls, raw: Json) -> Policy:
        return cls(raw["name"], raw["version"], raw["max_staleness"], raw["gate"], raw)

    @property
    def calls(self) -> dict[str, int]:
        """After pause and resume: what became of the calls that were in flight."""
        return dict(self.raw.get("calls") or {})

    @property
    def lanes(self) -> dict[str, Json]:
        """After a push: each lane's state, seconds, and how far its engine was from the probe."""
        return dict(self.raw.get("lanes") or {})
