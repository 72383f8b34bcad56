"""claude_code: how the program is started, and which of its calls stand aside. The real one runs in tests/harnesses."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from polar import harnesses
from polar.errors import SpecError
from polar.harnesses import Workplace
from polar.harnesses.claude_code import ClaudeCode
from polar.harnesses.program import INSTRUCTION
from polar.messages import Message, ModelRequest
from polar.spec import AgentSpec
from tests.unit.harnesses.rig import MCP

REQUEST = ModelRequest("m", (Message("user", "a"),))


def made(settings: dict[str, Any] | None = None, **fields: Any) -> ClaudeCode:
    """The harness with these settings."""
    spec = AgentSpec.model_validate({"harness": "claude_code", "settings": settings or {}, **fields})
    harness = harnesses.create(spec)
    assert isinstance(harness, ClaudeCode)
    return harness


def test_options(place: Workplace) -> None:
    """Each setting is an option that holds its value whatever it looks like; what is not set is not passed."""
    bare = shlex.split(made({"install": False}).command(place))
    assert bare[:2] == ["claude", "-p"]
    assert bare[2:-1] == [
        *("--output-format", "stream-json", "--verbose"),
        *("--dangerously-skip-permissions", "--strict-mcp-config"),
    ]
    assert bare[-1].endswith(INSTRUCTION)
    settings = {
        "install": False,
        "max_turns": 5,
        "reasoning_effort": "low",
        "max_budget_usd": 3.5,
        "fallback_model": "other",
        "append_system_prompt": "--say $x",
        "allowed_tools": ["Bash(git *)", "Read"],
        "disallowed_tools": "WebFetch",
    }
    words = shlex.split(made(settings).command(place))
    assert words[len(bare) - 1 : -1] == [
        "--max-turns=5",
        "--effort=low",
        "--max-budget-usd=3.5",
        "--fallback-model=other",
        "--append-system-prompt=--say $x",
        "--allowed-tools=Bash(git *),Read",
        "--disallowed-tools=WebFetch",
    ]


def test_every_model_is_the_sessions(place: Workplace) -> None:
    """Whatever class of model it asks for, it asks the proxy for the session's; the task's own variables win."""
    env = made({"max_thinking_tokens": 0}, env={"CLAUDE_CODE_MAX_RETRIES": "0"}).env(place)
    models = {name: value for name, value in env.items() if name.startswith("ANTHROPIC_") and name.endswith("MODEL")}
    assert set(models.values()) == {place.connection.model}
    assert {"ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"} <= models.keys()
    assert env["CLAUDE_CODE_SUBAGENT_MODEL"] == place.connection.model
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_API_KEY"]) == ("http://127.0.0.1:9/s/key", "sk-key")
    assert env["CLAUDE_CONFIG_DIR"].startswith(place.runtime.home)
    assert (env["MAX_THINKING_TOKENS"], env["CLAUDE_CODE_MAX_RETRIES"]) == ("0", "0")
    assert "MAX_THINKING_TOKENS" not in made().env(place)


def test_servers_skills_logs_and_exit_code(place: Workplace) -> None:
    """Servers and skills are where it looks for them, the instruction is its input, and its exit code is believed."""
    script = 'mkdir -p "$CLAUDE_CONFIG_DIR/projects/a"; cat > "$CLAUDE_CONFIG_DIR/projects/a/b.jsonl"; exit 7'
    prepare = f"mkdir -p bin skills/greet && echo hi > skills/greet/SKILL.md && printf '%s' {shlex.quote(script)} > x"
    assert place.runtime.exec(f"{prepare} && (echo '#!/bin/sh'; cat x) > bin/claude", limits=place.limits).ok
    assert place.runtime.exec("chmod +x bin/claude", limits=place.limits).ok
    path = {"PATH": f"{place.runtime.workdir}/bin:/usr/bin:/bin"}
    skills = f"{place.runtime.workdir}/skills"
    harness = made({"install": False}, env=path, mcp_servers=MCP, skills_path=skills)
    harness.setup(place)
    ended = harness.run(place)
    assert (ended.state, ended.exit_code) == ("failed", 7)
    assert (place.logs / "claude-projects" / "a" / "b.jsonl").read_text() == place.instruction
    shown = place.runtime.exec(f"cat {place.runtime.home}/.claude/skills/greet/SKILL.md", limits=place.limits)
    assert shown.stdout == "hi\n"
    (option,) = (word for word in harness.arguments(place) if word.startswith("--mcp-config="))
    written = place.runtime.exec(f"cat {option.partition('=')[2]}", limits=place.limits).stdout
    assert json.loads(written)["mcpServers"] == {
        "files": {"type": "stdio", "command": "serve", "args": ["--here"]},
        "old": {"type": "sse", "url": "http://x/sse"},
        "web": {"type": "http", "url": "http://x/mcp"},
    }


@pytest.mark.parametrize(
    ("headers", "auxiliary", "subagent"),
    [
        ({}, None, None),
        ({"x-claude-code-request-class": "main"}, None, None),
        ({"x-claude-code-request-class": "compaction"}, "compaction", None),
        ({"x-claude-code-request-class": "auxiliary"}, "auxiliary", None),
        ({"x-claude-code-request-class": "side_reply"}, "side_reply", None),
        ({"x-claude-code-request-class": "subagent", "x-claude-code-agent-type": "Explore"}, None, "Explore"),
        ({"x-claude-code-agent-id": "a1"}, None, "a1"),
        ({"x-claude-code-request-class": "workflow"}, None, "unnamed"),
    ],
)
def test_roles(headers: dict[str, str], auxiliary: str | None, subagent: str | None) -> None:
    """It says in its headers what a call is for."""
    assert ClaudeCode.auxiliary(REQUEST, headers) == auxiliary
    assert ClaudeCode.subagent(REQUEST, headers) == subagent


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"version": "1; rm -rf"}, "version"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"max_budget_usd": 0}, "max_budget_usd"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
        ({"maxturns": 3}, "maxturns"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], field: str) -> None:
    """What cannot be is refused at submit, by name."""
    with pytest.raises(SpecError) as refused:
        made(settings)
    assert refused.value.errors[0][0] == f"agent.settings.{field}"
