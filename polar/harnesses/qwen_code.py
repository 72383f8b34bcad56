"""Qwen Code, unmodified from npm, over Chat Completions.

Run once without a terminal, every tool allowed. Its automatic memory is off unless asked for: it goes on from the
main conversation after the task is done, and no request of it says so.
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

VERSION = "0.24.4"
ANSWER_TOOL = "respond_in_schema"
"""The one tool of its questions aside that want JSON back."""
MAIN = "You are Qwen Code"
"""How the main conversation's system message begins; sub-agents have one of their own."""


class Settings(ProgramSettings):
    """`agent.settings` of qwen_code."""

    version: Release = VERSION
    max_turns: int | None = Field(default=None, ge=1)
    """Turns it takes at most, by its own count; None: within the session's budget."""
    context_length: int | None = Field(default=None, ge=1024)
    """What it takes the model's context to be; None: what it knows of the model's name."""
    memory: bool = False
    """Its automatic memory: agents that read the conversation when the task is done."""


class QwenCode(NpmProgram):
    """Runs `qwen`."""

    name = "qwen_code"
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    COMMAND = "qwen"
    SETTINGS = Settings
    SKILLS = ".qwen/skills"
    LOGS = {"qwen-chats": ".qwen/projects"}
    BY_STDIN = True
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"@qwen-code/qwen-code@{self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        memory, length = self.settings.memory, self.settings.context_length
        config: dict[str, Any] = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "memory": {"enableManagedAutoMemory": memory, "enableManagedAutoDream": memory},
            "mcpServers": {server.name: _mcp(server) for server in self.spec.mcp_servers},
        }
        if length is not None:
            config["model"] = {"generationConfig": {"contextWindowSize": length}}
        return {".qwen/settings.json": json.dumps(config, indent=2)}

    def arguments(self, place: Workplace) -> Sequence[str]:
        turns = [] if self.settings.max_turns is None else ["--max-session-turns", str(self.settings.max_turns)]
        return ["--yolo", "--auth-type", "openai", "--output-format", "stream-json", *turns]

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        if not request.tools:
            return "a call without tools: summary or other text"
        if len(request.tools) == 1 and request.tools[0].name == ANSWER_TOOL:
            return "a question that wants JSON: title, next speaker, memory"
        return None

    @staticmethod
    def subagent(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        first = request.messages[0]
        return None if first.role == "system" and first.content.startswith(MAIN) else "agent"


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), "trust": True}
    return {"url" if server.transport == "sse" else "httpUrl": server.url, "trust": True}
