"""Gemini CLI, unmodified from npm, over Google's generateContent.

Run once without a terminal, every tool allowed, in a folder that it trusts, with its reports home and its updates
off. Its main loop streams, always; what it asks without streaming (which model to take, who speaks next, whether it
turns in circles, summaries) is aside. It ends with 53 at its own limit of turns, and after a model call that failed
for good with the low byte of that error's status. It keeps its settings and chats in ~/.gemini.
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
from polar.spec import MCPServerSpec

VERSION = "0.61.0"
CONFIG = ".gemini"
ADDRESSES = {"sse": "url", "streamable-http": "httpUrl"}
DECIDES: Mapping[str, str] = {
    "model_choice": "router: which model to take",
    "complexity_score": "router: how hard the task is",
    "next_speaker": "who speaks next",
    "unproductive_state_analysis": "whether it turns in circles",
    "noChangesRequired": "an edit that did not fit",
    "corrected_string_escaping": "an edit that did not fit",
    "chronological_summary": "summary",
}
"""What it asks to be answered in JSON, by a field of the answer."""
MATCHES: Sequence[Mapping[str, Any]] = ({"model": "base"}, {"isChatModel": True})
"""Of all its model configurations, which inherit from `base` or are of a loop of their own."""
SEARCHES: Mapping[str, str] = {"googleSearch": "web search", "urlContext": "web page"}
SUBAGENT_TOOL = "complete_task"
"""Offered to its sub-agents, which report with it, and to nobody else."""


class Settings(ProgramSettings):
    """`agent.settings` of gemini_cli."""

    version: Release = VERSION
    max_turns: int | None = Field(default=None, ge=1)
    """Turns it takes at most, by its own count; it then ends with 53. None: within the session's budget."""


class GeminiCLI(NpmProgram):
    """Runs `gemini`."""

    name = "gemini_cli"
    COMMAND = "gemini"
    SETTINGS = Settings
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    SKILLS = f"{CONFIG}/skills"
    LOGS = {"gemini-sessions": f"{CONFIG}/tmp"}
    BY_STDIN = True
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"@google/gemini-cli@{self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        settings: dict[str, Any] = {
            # Its ten tries take minutes, and the proxy has tried again already.
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "maxAttempts": 3},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "tools": {"sandbox": False},
            # Whatever model it would take for a side call or a sub-agent is the session's.
            "modelConfigs": {"customOverrides": [_always(place.connection.model, match) for match in MATCHES]},
            "mcpServers": {server.name: _mcp(server) for server in self.spec.mcp_servers},
        }
        if self.settings.max_turns is not None:
            settings["model"] = {"maxSessionTurns": self.settings.max_turns}
        return {f"{CONFIG}/settings.json": json.dumps(settings, indent=2)}

    def arguments(self, place: Workplace) -> Sequence[str]:
        return ["--approval-mode=yolo", "--model", place.connection.model, "--output-format", "stream-json"]

    def variables(self, place: Workplace) -> Mapping[str, str]:
        return {
            "GEMINI_CLI_HOME": place.runtime.home,
            "GEMINI_SANDBOX": "false",
            # It would start itself anew, with half of the machine's memory for its heap.
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }

    def ended(self, place: Workplace, result: ExecResult) -> AgentExit:
        ended = super().ended(place, result)
        if (said := _stopped(place.logs / "agent.stdout")) is not None:
            ended.detail["stopped"] = said
        return ended

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        if request.stream:
            return None
        schema = request.sampling.json_schema or ""
        for name, why in DECIDES.items():
            if f'"{name}":' in schema:
                return why
        for mark in request.marks:
            if (tool := mark.removeprefix("tool_unavailable:")) in SEARCHES:
                return SEARCHES[tool]
        return "a call without streaming: summary"

    @staticmethod
    def subagent(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        return "agent" if request.tool(SUBAGENT_TOOL) is not None else None


def _always(model: str, match: Mapping[str, Any]) -> dict[str, Any]:
    return {"match": match, "modelConfig": {"model": model}}


def _stopped(printed: Path) -> str | None:
    """What it last gave as an error of its own. It ends with 0 also when it found itself turning in circles."""
    said = None
    for line in printed.read_text(errors="replace").splitlines() if printed.is_file() else ():
        if line.startswith('{"type":"error"'):
            try:
                said = str(json.loads(line)["message"])
            except (ValueError, KeyError):  # cut off in the middle of writing
                continue
    return said


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    # Trusted: without a terminal nobody could be asked.
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), "trust": True}
    return {ADDRESSES[server.transport]: server.url, "trust": True}
