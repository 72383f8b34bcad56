"""A builder puts a session's completions together: completions in, traces out.

Pure: no database, no clock. What is handed in is what was recorded; what comes out says of every
completion where it went. Rewards are decided elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded completion, as builders see it."""

    id: str
    parent_id: str | None
    parent_reason: str
    prompt_ids: Ids
    """[P] what the engine was given, whole."""
    output_ids: Ids
    """[T] what was sampled, stop token included."""
    logprobs: Floats | None
    """[T] at which each was sampled, natural log."""
    request: Mapping[str, Any]
    """{"messages": [...], "tools": [...]} in the OpenAI Chat form; may be read only when looked at."""
    answer: dict[str, Any]
    """The served assistant message in the same form."""
    finish_reason: str | None
    outcome: str = "answered"
    role: str = "main"
    prompt_verified: bool | None = None
    delivered: bool = True
    flags: tuple[str, ...] = ()
    policy_versions: tuple[dict[str, Any], ...] = ()
    model_requested: str = ""
    model_used: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    context_len: int | None = None
    """Messages in the request, where that is known without reading it."""
    head: str | None = None
    """Names what stood before the first message, tools above all, where that is known without reading them."""
    trim: int = 0
    """How many ids at the end of its parent's output its prompt does not keep: a stop that history spells otherwise."""

    def messages(self) -> int:
        """How many messages the request has."""
        return len(self.request.get("messages") or []) if self.context_len is None else self.context_len


@dataclass(slots=True)
class Trace:
    """One token stream, ready to train on. prompt_ids + response_ids is the whole stream."""

    prompt_ids: Ids
    """[P]"""
    response_ids: Ids
    """[R] sampled tokens and what the harness put between them."""
    loss_mask: NDArray[np.uint8]
    """[R] 1 where the token was sampled by the policy."""
    logprobs: Floats | None
    """[R] 0.0 where the mask is 0; None if any sampled token lacks one."""
    prompt_messages: list[dict[str, Any]]
    response_messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    finish_reason: str | None
    certificate: dict[str, Any]
    """`fidelity` (exact, drifted, unverified) and what a trainer should know: flags, spans, first difference."""
    completion_ids: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def fidelity(self) -> str:
        return str(self.certificate["fidelity"])


@dataclass(slots=True)
class Built:
    """A trajectory before its rewards."""

    traces: list[Trace]
    stats: dict[str, Any]
    """`reconstruction_stats` of the original's wire, and where every completion went."""


class Builder(ABC):
    """One way of putting completions together; made anew for each session with the task's config."""

    name: ClassVar[str]
    NEEDS_IDS: ClassVar[bool] = True
    """Makes token streams; a task with it is refused where the engine gives no ids."""

    def __init__(self, **config: Any) -> None:  # noqa: B027 - a member without settings may leave it as it is
        """Raises SpecError for a key it does not know; called at submit, too."""

    @abstractmethod
    def build(self, calls: list[Call]) -> Built:
        """`calls` in the order in which they were requested. Raises BuilderError."""
