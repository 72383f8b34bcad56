"""Pi, unmodified from npm, over Chat Completions.

Run once without a terminal, with a provider of ours among its models. It asks for no permission. It ends with 0
also when a model call failed for good: whether it did is in the last answer that its session file holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from polar.harnesses.base import AgentExit, Workplace
from polar.harnesses.program import NpmProgram, ProgramSettings, Release
from polar.messages import ModelRequest
from polar.runtimes.base import ExecResult

VERSION = "0.87.1"
PROVIDER = "polar"


class Settings(ProgramSettings):
    """`agent.settings` of pi."""

    version: Release = VERSION
    context_length: int = Field(default=262_144, ge=1024)
    """What it takes the model's context to be: it makes room by a summary before that."""
    max_output_tokens: int = Field(default=32_000, ge=256)
    """What it asks for in a turn at most."""


class Pi(NpmProgram):
    """Runs `pi`."""

    name = "pi"
    SUPPORTS_SKILLS = True
    COMMAND = "pi"
    SETTINGS = Settings
    SKILLS = ".pi/agent/skills"
    LOGS = {"pi-sessions": ".pi/agent/sessions"}
    BY_STDIN = True  # as an argument, a first "@" would name a file
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"@earendil-works/pi-coding-agent@{self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        model = {
            "id": place.connection.model,
            "contextWindow": self.settings.context_length,
            "maxTokens": self.settings.max_output_tokens,
        }
        provider = {
            "baseUrl": f"{place.connection.base_url}/v1",
            "api": "openai-completions",
            "apiKey": "$OPENAI_API_KEY",
            "models": [model],
        }
        return {".pi/agent/models.json": json.dumps({"providers": {PROVIDER: provider}}, indent=2)}

    def arguments(self, place: Workplace) -> Sequence[str]:
        return ["--print", "--mode", "json", "--provider", PROVIDER, "--model", place.connection.model]

    def ended(self, place: Workplace, result: ExecResult) -> AgentExit:
        ended = super().ended(place, result)
        why = _failure(place.logs / "pi-sessions") if ended.state == "completed" else None
        return ended if why is None else AgentExit("failed", result.exit_code, f"pi exited with 0, but: {why}")

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        # Its loop always has tools: what has none sums up a history that became too long.
        return None if request.tools else "a call without tools: summary"

    def variables(self, place: Workplace) -> Mapping[str, str]:
        return {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}


def _failure(sessions: Path) -> str | None:
    """Why the last answer of its session did not come whole; None if it did."""
    last: dict[str, Any] = {}
    for path in sorted(sessions.glob("*/*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                message = json.loads(line).get("message") or {}
            except (ValueError, AttributeError):  # cut off in the middle of writing
                continue
            if message.get("role") == "assistant":
                last = message
    if last.get("stopReason") in ("error", "aborted"):
        return str(last.get("errorMessage") or last["stopReason"])
    return None
