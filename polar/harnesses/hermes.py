"""Hermes Agent, unmodified from PyPI, over Chat Completions.

Run for one query without a terminal, every command allowed, with a provider of ours in its configuration. Its
memory is off: a session starts from nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from polar.harnesses.base import Workplace
from polar.harnesses.program import ProgramSettings, PythonProgram, Release
from polar.messages import ModelRequest
from polar.spec import MCPServerSpec

VERSION = "0.19.0"
PROVIDER = "polar"
DELEGATED = "You are a focused subagent"
"""In the system message of an agent that the tool `delegate_task` starts, after that of the main one."""


class Settings(ProgramSettings):
    """`agent.settings` of hermes."""

    version: Release = VERSION
    context_length: int = Field(default=262_144, ge=1024)
    """What it takes the model's context to be: it makes room by a summary before that."""
    max_turns: int = Field(default=90, ge=1)
    """Model calls it makes at most."""
    toolsets: tuple[str, ...] = ("terminal", "file", "todo")
    """Its groups of tools that the model is offered."""


class Hermes(PythonProgram):
    """Runs `hermes`."""

    name = "hermes"
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    COMMAND = "hermes"
    SETTINGS = Settings
    SKILLS = ".hermes/skills"
    LOGS = {"hermes-logs": ".hermes/logs"}
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"hermes-agent[mcp]=={self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        model = place.connection.model
        provider = {
            "base_url": f"{place.connection.base_url}/v1",
            "key_env": "OPENAI_API_KEY",
            "transport": "chat_completions",
            "default_model": model,
            "models": {model: {"context_length": self.settings.context_length}},
            "discover_models": False,
        }
        config = {
            "model": {"provider": PROVIDER, "default": model, "context_length": self.settings.context_length},
            "providers": {PROVIDER: provider},
            "agent": {"max_turns": self.settings.max_turns},
            "memory": {"memory_enabled": False, "user_profile_enabled": False},
            # Otherwise a second agent goes over the finished conversation, to write skills from it.
            "skills": {"creation_nudge_interval": 0},
            "security": {"tirith_enabled": False},
            "checkpoints": {"enabled": False},
            "model_catalog": {"enabled": False},
            "mcp_servers": {server.name: _mcp(server) for server in self.spec.mcp_servers},
        }
        # JSON is YAML, too.
        return {".hermes/config.yaml": json.dumps(config, indent=2)}

    def arguments(self, place: Workplace) -> Sequence[str]:
        # Each server's tools are a group under its name, and so are those that read skills.
        tools = [*self.settings.toolsets, *(server.name for server in self.spec.mcp_servers)]
        tools += ["skills"] * bool(self.spec.skills_path)
        model = ["--provider", PROVIDER, "--model", place.connection.model]
        return ["--yolo", "chat", "--quiet", "--toolsets", ",".join(tools), *model, f"--query={place.instruction}"]

    def variables(self, place: Workplace) -> Mapping[str, str]:
        return {"HERMES_HOME": f"{place.runtime.home}/.hermes"}

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        # Its loop always has tools: what has none names the session, or sums up a history that became too long.
        return None if request.tools else "a call without tools: title or summary"

    @staticmethod
    def subagent(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        first = request.messages[0]
        return "delegate_task" if first.role == "system" and DELEGATED in first.content else None


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args)}
    return {"url": server.url, **({"transport": "sse"} if server.transport == "sse" else {})}
