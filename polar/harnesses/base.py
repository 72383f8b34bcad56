"""A harness is an agent program and how to start it. It sees a base URL, a key and a runtime; not Polar.

A member knows how to install its program (optional), configure it, run it, and which of its model calls
are auxiliary. Budgets and leases belong to the stage that calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from polar.errors import SpecError
from polar.messages import ModelRequest
from polar.runtimes.base import ExecResult, Limits, Runtime
from polar.spec import AgentSpec, Spec, validation_errors

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the harness finds its model."""

    base_url: str
    """Root of the proxy as seen from inside the runtime, without a slash at the end."""
    api_key: str
    model: str

    def env(self) -> dict[str, str]:
        """The variables that the providers' own client libraries read."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_BASE": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
            "GOOGLE_GEMINI_BASE_URL": self.base_url,
            "GOOGLE_API_URL": self.base_url,
            "GOOGLE_API_KEY": self.api_key,
            "GEMINI_API_KEY": self.api_key,
        }


@dataclass(frozen=True, slots=True)
class Workplace:
    """Everything a harness needs for one session."""

    runtime: Runtime
    connection: Connection
    instruction: str
    env: Mapping[str, str]
    """Session ids and paths, the runtime's and the agent's variables, merged in that order."""
    limits: Limits
    logs: Path
    """Folder on the node for what the program prints."""
    cache: Path
    """Folder on the node where installed programs are kept between sessions."""


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How the agent went; stored as the result of execute, not as the session's state."""

    state: str
    """completed, failed, timed_out or cancelled."""
    exit_code: int | None
    error: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, result: ExecResult, program: str) -> AgentExit:
        """From the end of a command: its exit code is believed as it is."""
        if result.cancelled:
            return cls("cancelled", result.exit_code, f"{program} was stopped")
        if result.timed_out:
            return cls("timed_out", result.exit_code, f"{program} {result.summary()}")
        if not result.ok:
            return cls("failed", result.exit_code, f"{program} {result.summary()}")
        return cls("completed", 0)


def settings_of(spec: AgentSpec, model: type[S]) -> S:
    """`spec.settings` as a member's own typed settings. Raises SpecError naming each wrong field."""
    try:
        return model.model_validate(spec.settings)
    except ValidationError as error:
        errors = [(f"agent.settings.{field}", reason) for field, reason in validation_errors(error)]
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors), errors=errors) from None


class Harness(ABC):
    """One agent program."""

    name: ClassVar[str]
    SUPPORTS_MCP: ClassVar[bool] = False
    """Passes MCP servers on in its own format."""
    SUPPORTS_SKILLS: ClassVar[bool] = False
    """Passes a skills folder on."""
    STARTED_HERE: ClassVar[bool] = True
    """Polar runs it; otherwise its sessions are opened by whoever does."""

    def __init__(self, spec: AgentSpec) -> None:
        """Raises SpecError where `spec.settings` cannot be; called at submit, too."""
        self.spec = spec

    def setup(self, place: Workplace) -> None:  # noqa: B027 - optional
        """Install and configure; part of the agent's budget. Raises HarnessError."""

    @abstractmethod
    def run(self, place: Workplace) -> AgentExit:
        """Run to the end."""

    def collect(self, place: Workplace) -> None:  # noqa: B027 - optional
        """Fetch logs after the run; failures here do not change the result."""

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        """Why this call is a side call (title, summary, router …) of this program; None for its main loop.

        `headers`: lower-case names. Called by the proxy for every call, so it looks and does not search."""
        return None

    @staticmethod
    def subagent(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        """The name of the sub-agent that makes this call, where the program says; None for its main loop."""
        return None
