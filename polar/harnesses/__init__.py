"""Harnesses by name: the one place that knows which there are."""

from __future__ import annotations

from polar.errors import SpecError
from polar.harnesses.base import AgentExit, Connection, Harness, Workplace
from polar.registry import load
from polar.spec import AgentSpec

HARNESSES = {
    "external": "polar.harnesses.external:ExternalHarness",
    "shell": "polar.harnesses.shell:ShellHarness",
    "mini_swe_agent": "polar.harnesses.mini_swe_agent:MiniSweAgent",
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
