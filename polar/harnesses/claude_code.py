"""Claude Code, unmodified from npm, over Anthropic Messages.

Run once without a terminal, every tool allowed. Whatever model it asks for by class (a small one for side work, one
for sub-agents) is the session's. It keeps its settings and conversations in ~/.claude.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from polar.harnesses.base import Workplace
from polar.harnesses.program import NpmProgram, ProgramSettings, Release
from polar.messages import ModelRequest
from polar.spec import MCPServerSpec

VERSION = "2.1.329"
CONFIG = ".claude"
MCP_CONFIG = f"{CONFIG}/polar-mcp.json"
CLASSES = ("FABLE", "OPUS", "SONNET", "HAIKU")
"""Of models, as its variables name them."""
REQUEST_CLASS, AGENT_TYPE = "x-claude-code-request-class", "x-claude-code-agent-type"
AGENT_ID = "x-claude-code-agent-id"
SIDE_CLASSES = frozenset({"auxiliary", "compaction", "side_reply"})
AGENT_CLASSES = frozenset({"subagent", "workflow"})
TRANSPORTS = {"sse": "sse", "streamable-http": "http"}


class Settings(ProgramSettings):
    """`agent.settings` of claude_code."""

    version: Release = VERSION
    max_turns: int | None = Field(default=None, ge=1)
    """Turns it takes at most, by its own count; None: within the session's budget."""
    reasoning_effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Noted on each completion; what the model makes of it is the model's affair."""
    max_budget_usd: float | None = Field(default=None, gt=0)
    """By its own price list."""
    fallback_model: str | None = Field(default=None, min_length=1)
    append_system_prompt: str | None = None
    allowed_tools: str | tuple[str, ...] = ()
    disallowed_tools: str | tuple[str, ...] = ()
    max_thinking_tokens: int | None = Field(default=None, ge=0)
    """0 turns thinking off; any other number it passes on only for models that it knows."""


class ClaudeCode(NpmProgram):
    """Runs `claude`."""

    name = "claude_code"
    COMMAND = "claude"
    SETTINGS = Settings
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    SKILLS = f"{CONFIG}/skills"
    LOGS = {"claude-projects": f"{CONFIG}/projects"}
    BY_STDIN = True
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"@anthropic-ai/claude-code@{self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        servers = {server.name: _mcp(server) for server in self.spec.mcp_servers}
        return {MCP_CONFIG: json.dumps({"mcpServers": servers})} if servers else {}

    def arguments(self, place: Workplace) -> Sequence[str]:
        settings = self.settings
        # Only what the task names: a repository's own .mcp.json would start servers that nobody asked for.
        argv = ["-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
        argv.append("--strict-mcp-config")
        if self.spec.mcp_servers:
            argv.append(f"--mcp-config={place.runtime.home}/{MCP_CONFIG}")
        options = {
            "max-turns": settings.max_turns,
            "effort": settings.reasoning_effort,
            "max-budget-usd": settings.max_budget_usd,
            "fallback-model": settings.fallback_model,
            "append-system-prompt": settings.append_system_prompt,
            "allowed-tools": _names(settings.allowed_tools),
            "disallowed-tools": _names(settings.disallowed_tools),
        }
        return [*argv, *(f"--{name}={value}" for name, value in options.items() if value is not None)]

    def variables(self, place: Workplace) -> Mapping[str, str]:
        model, thinking = place.connection.model, self.settings.max_thinking_tokens
        return {
            **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name in CLASSES},
            "CLAUDE_CODE_SUBAGENT_MODEL": model,
            "CLAUDE_CONFIG_DIR": f"{place.runtime.home}/{CONFIG}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # It then says in headers what each call is for.
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
            "DISABLE_AUTOUPDATER": "1",
            # As root it refuses to skip permissions anywhere else.
            "IS_SANDBOX": "1",
            # Its ten tries take minutes, and the proxy has tried again already.
            "CLAUDE_CODE_MAX_RETRIES": "3",
            **({} if thinking is None else {"MAX_THINKING_TOKENS": str(thinking)}),
        }

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        said = headers.get(REQUEST_CLASS, "")
        return said if said in SIDE_CLASSES else None

    @staticmethod
    def subagent(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        if headers.get(REQUEST_CLASS) in AGENT_CLASSES or AGENT_ID in headers:
            return headers.get(AGENT_TYPE) or headers.get(AGENT_ID) or "unnamed"
        return None


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"type": "stdio", "command": server.command, "args": list(server.args)}
    return {"type": TRANSPORTS[server.transport], "url": server.url}


def _names(tools: str | tuple[str, ...]) -> str | None:
    return (tools if isinstance(tools, str) else ",".join(tools)) or None
