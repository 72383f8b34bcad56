"""Codex, unmodified from npm, over OpenAI Responses.

Run once without a terminal, every command allowed, with a model provider of ours in its configuration. It says in a
header what each call is for, and in another one which sub-agent makes it. It keeps everything in ~/.codex.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import Field

from polar.errors import SpecError
from polar.harnesses.base import Workplace
from polar.harnesses.program import NpmProgram, ProgramSettings, Release
from polar.messages import ModelRequest
from polar.spec import AgentSpec, MCPServerSpec

VERSION = "0.169.0"
CONFIG = ".codex"
PROVIDER = "polar"
PATIENCE = 3_600_000
"""Milliseconds without an event after which it gives a stream up; what keeps a stream alive is no event to it."""
METADATA, SUBAGENT, THREAD = "x-codex-turn-metadata", "x-openai-subagent", "thread-id"
MAIN_KINDS = frozenset({"turn", ""})
SIDE_AGENTS = frozenset({"compact", "memory_consolidation"})
SERVER_NAME = re.compile(r"^[A-Za-z0-9_-]+$")


class Settings(ProgramSettings):
    """`agent.settings` of codex."""

    version: Release = VERSION
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Noted on each completion; what the model makes of it is the model's affair."""
    reasoning_summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """In which form the model's reasoning comes back to it: as a summary, or, with none, as it is."""
    context_length: int | None = Field(default=None, ge=1024)
    """The model's context length. It takes a model that it does not know for a large one, and makes room by a summary
    only shortly before the end."""


class Codex(NpmProgram):
    """Runs `codex exec`."""

    name = "codex"
    COMMAND = "codex"
    SETTINGS = Settings
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    SKILLS = f"{CONFIG}/skills"
    LOGS = {"codex-sessions": f"{CONFIG}/sessions"}
    BY_STDIN = True
    settings: Settings

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        for index, server in enumerate(spec.mcp_servers):
            where = f"agent.mcp_servers.{index}"
            if server.transport == "sse":
                raise SpecError.at(f"{where}.transport", "codex knows stdio and streamable-http")
            if not SERVER_NAME.match(server.name):
                raise SpecError.at(f"{where}.name", "codex takes letters, digits, '-' and '_'")

    def packages(self) -> Sequence[str]:
        return [f"@openai/codex@{self.settings.version}"]

    def files(self, place: Workplace) -> Mapping[str, str]:
        settings = {
            "model": place.connection.model,
            "model_provider": PROVIDER,
            "model_reasoning_effort": self.settings.reasoning_effort,
            "model_reasoning_summary": self.settings.reasoning_summary,
            "model_context_window": self.settings.context_length,
            "approval_policy": "never",
            "sandbox_mode": "danger-full-access",
            "web_search": "disabled",
            "check_for_update_on_startup": False,
        }
        provider = {
            "name": "Polar",
            "base_url": f"{place.connection.base_url}/v1",
            "env_key": "OPENAI_API_KEY",
            "wire_api": "responses",
            "supports_websockets": False,
            # It multiplies the two, and the proxy has tried again already.
            "request_max_retries": 2,
            "stream_max_retries": 2,
            "stream_idle_timeout_ms": PATIENCE,
        }
        # What belongs to no table must come before the first one.
        lines = _lines(settings)
        lines += _table(("analytics",), {"enabled": False})
        lines += _table(("feedback",), {"enabled": False})
        lines += _table(("model_providers", PROVIDER), provider)
        lines += _table(("projects", place.runtime.workdir), {"trust_level": "trusted"})
        for server in self.spec.mcp_servers:
            lines += _table(("mcp_servers", server.name), _mcp(server))
        return {f"{CONFIG}/config.toml": "\n".join([*lines, ""])}

    def arguments(self, place: Workplace) -> Sequence[str]:
        alone = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", *alone, "--model", place.connection.model, "-"]

    def variables(self, place: Workplace) -> Mapping[str, str]:
        return {"CODEX_HOME": f"{place.runtime.home}/{CONFIG}"}

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        kind = _metadata(headers).get("request_kind") or ""
        if kind not in MAIN_KINDS:
            return str(kind)
        agent = headers.get(SUBAGENT, "")
        return agent if agent in SIDE_AGENTS else None

    @staticmethod
    def subagent(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        agent = headers.get(SUBAGENT)
        return f"{agent} {headers.get(THREAD, '')}".strip() if agent else None


def _metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = orjson.loads(headers.get(METADATA, "{}"))
    except orjson.JSONDecodeError:  # of another version than the one this was written for
        return {}
    return found if isinstance(found, dict) else {}


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args)}
    return {"url": server.url}


def _table(path: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    return ["", f"[{'.'.join(map(_text, path))}]", *_lines(values)]


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in values.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _text(value: str) -> str:
    """A string of TOML: JSON's escapes are among TOML's, which wants one more character escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
