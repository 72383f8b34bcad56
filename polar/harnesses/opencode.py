"""opencode, unmodified from npm, over Chat Completions.

Run once without a terminal, every tool allowed, with a provider of ours in its configuration. Its first model call
is aside: it names the session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from polar.harnesses.base import Workplace
from polar.harnesses.program import NpmProgram, ProgramSettings, Release
from polar.messages import ModelRequest
from polar.spec import MCPServerSpec

VERSION = "1.18.33"
PROVIDER = "polar"


class Settings(ProgramSettings):
    """`agent.settings` of opencode."""

    version: Release = VERSION
    context_length: int = Field(default=262_144, ge=1024)
    """What it takes the model's context to be: it makes room by a summary before that."""
    max_output_tokens: int = Field(default=32_000, ge=256)
    """What it asks for in a turn at most."""


class OpenCode(NpmProgram):
    """Runs `opencode`."""

    name = "opencode"
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    COMMAND = "opencode"
    SETTINGS = Settings
    SKILLS = ".config/opencode/skills"
    LOGS = {"opencode-logs": ".local/share/opencode/log"}
    BY_STDIN = True  # as an argument it would be put in quotes, and its own quotes escaped
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"opencode-ai@{self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        model = place.connection.model
        limit = {"context": self.settings.context_length, "output": self.settings.max_output_tokens}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Polar",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {model: {"name": model, "limit": limit}},
        }
        config = {
            "model": f"{PROVIDER}/{model}",
            "small_model": f"{PROVIDER}/{model}",
            "enabled_providers": [PROVIDER],
            "provider": {PROVIDER: provider},
            "permission": {"*": "allow"},
            "share": "disabled",
            "autoupdate": False,
            "mcp": {server.name: _mcp(server) for server in self.spec.mcp_servers},
        }
        return {".config/opencode/opencode.json": json.dumps(config, indent=2)}

    def arguments(self, place: Workplace) -> Sequence[str]:
        model = f"{PROVIDER}/{place.connection.model}"
        return ["run", "--format", "json", "--print-logs", "--model", model]

    def variables(self, place: Workplace) -> Mapping[str, str]:
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        # Its agents always have tools: what has none gives the session its name, or sums it up.
        return None if request.tools else "a call without tools: title or summary"

    @staticmethod
    def subagent(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        return headers.get("x-session-id") if "x-parent-session-id" in headers else None


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"type": "local", "command": [server.command, *server.args], "enabled": True}
    return {"type": "remote", "url": server.url, "enabled": True}
