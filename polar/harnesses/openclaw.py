"""OpenClaw, unmodified from npm, over Chat Completions.

Its agent is run once, embedded and without its gateway, with a provider of ours in its configuration. The task's
folder is its workspace, and it is kept from putting files of its own there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from polar.harnesses.base import Workplace
from polar.harnesses.program import NpmProgram, ProgramSettings, Release
from polar.spec import MCPServerSpec

VERSION = "2026.5.27"
"""The last of its releases that were tried with Node.js 22; later ones want 24."""
PROVIDER = "polar"


class Settings(ProgramSettings):
    """`agent.settings` of openclaw."""

    version: Release = VERSION
    context_length: int = Field(default=262_144, ge=1024)
    """What it takes the model's context to be: it makes room by a summary before that."""
    max_output_tokens: int = Field(default=32_000, ge=256)
    """What it asks for in a turn at most."""


class OpenClaw(NpmProgram):
    """Runs `openclaw agent`."""

    name = "openclaw"
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    COMMAND = "openclaw"
    SETTINGS = Settings
    SKILLS = ".openclaw/skills"
    LOGS = {"openclaw-sessions": ".openclaw/agents/main/sessions"}
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"openclaw@{self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        model = {
            "id": place.connection.model,
            "name": place.connection.model,
            "contextWindow": self.settings.context_length,
            "maxTokens": self.settings.max_output_tokens,
        }
        provider = {
            "baseUrl": f"{place.connection.base_url}/v1",
            "apiKey": "${OPENAI_API_KEY}",
            "api": "openai-completions",
            "models": [model],
        }
        config = {
            "models": {"mode": "replace", "providers": {PROVIDER: provider}},
            "agents": {
                "defaults": {
                    "model": {"primary": f"{PROVIDER}/{place.connection.model}"},
                    "workspace": place.runtime.workdir,
                    "skipBootstrap": True,
                }
            },
            "tools": {"exec": {"host": "gateway", "security": "full", "ask": "off"}},
            "mcp": {"servers": {server.name: _mcp(server) for server in self.spec.mcp_servers}},
        }
        return {".openclaw/openclaw.json": json.dumps(config, indent=2)}

    def arguments(self, place: Workplace) -> Sequence[str]:
        return ["agent", "--local", "--json", "--agent", "main", f"--message={place.instruction}"]


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args)}
    return {"url": server.url, "transport": server.transport}
