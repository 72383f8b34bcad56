"""Harnesses by name: the one place that knows which there are."""

from __future__ import annotations

from polar.errors import SpecError
from polar.harnesses.base import AgentExit, Connection, Harness, Workplace
from polar.registry import load
from polar.spec import AgentSpec

HARNESSES = {
    "claude_code": "polar.harnesses.claude_code:ClaudeCode",
    "codex": "polar.harnesses.codex:Codex",
    "external": "polar.harnesses.external:ExternalHarness",
    "gemini_cli": "polar.harnesses.gemini_cli:GeminiCLI",
    "shell": "polar.harnesses.shell:ShellHarness",
    "hermes": "polar.harnesses.hermes:Hermes",
    "mini_swe_agent": "polar.harnesses.mini_swe_agent:MiniSweAgent",
    "openclaw": "polar.harnesses.openclaw:OpenClaw",
    "opencode": "polar.harnesses.opencode:OpenCode",
    "openhands_sdk": "polar.harnesses.openhands_sdk:OpenHandsSDK",
    "pi": "polar.harnesses.pi:Pi",
    "qwen_code": "polar.harnesses.qwen_code:QwenCode",
    "swe_agent": "polar.harnesses.swe_agent:SweAgent",
}


def create(spec: AgentSpec) -> Harness:
    """The harness of `spec`; also how a spec is checked at submit. Raises SpecError naming the field."""
    field = "agent.import_path" if spec.import_path is not None else "agent.harness"
    member: type[Harness] = load(field, HARNESSES, spec.name, Harness)  # type: ignore[type-abstract]
    if spec.mcp_servers and not member.SUPPORTS_MCP:
        raise SpecError.at("agent.mcp_servers", f"harness {spec.name!r} cannot pass MCP servers on")
    if spec.skills_path and not member.SUPPORTS_SKILLS:
        raise SpecError.at("agent.skills_path", f"harness {spec.name!r} cannot pass skills on")
    return member(spec)


__all__ = ["HARNESSES", "AgentExit", "Connection", "Harness", "Workplace", "create"]
