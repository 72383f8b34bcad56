"""The codex preset: its configuration is TOML that says what was meant, and its headers say what a call is for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from polar import harnesses, runtimes
from polar.errors import SpecError
from polar.harnesses import Connection, Workplace
from polar.harnesses.codex import Codex
from polar.messages import ModelRequest
from polar.runtimes import Limits
from polar.spec import AgentSpec, RuntimeSpec

NASTY = 'a "b" \\ \x7f \n[x] = é'
REQUEST = ModelRequest("m", ())


def codex(**spec: Any) -> Codex:
    """The preset of this agent."""
    harness = harnesses.create(AgentSpec.model_validate({"harness": "codex", **spec}))
    assert isinstance(harness, Codex)
    return harness


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A session's workplace in a local runtime that is not started."""
    return Workplace(
        runtime=runtimes.create(RuntimeSpec(backend="local"), "s", tmp_path / "workspace"),
        connection=Connection("http://127.0.0.1:9/s/key", "sk-key", NASTY),
        instruction=NASTY,
        env={"SESSION_ID": "s"},
        limits=Limits(30),
        logs=tmp_path / "logs",
        cache=tmp_path / "cache",
    )


def test_its_configuration_is_what_was_meant(place: Workplace) -> None:
    """Every value is in its own table, whatever characters it has, and the provider is the session's proxy."""
    servers = [
        {"name": "one", "transport": "stdio", "command": "run", "args": ["-x", NASTY]},
        {"name": "two", "transport": "streamable-http", "url": "http://there/mcp"},
    ]
    settings = {"reasoning_effort": "high", "reasoning_summary": "none", "context_length": 32768}
    (text,) = codex(mcp_servers=servers, settings=settings).files(place).values()
    config = tomllib.loads(text)
    assert (config["model"], config["model_provider"], config["approval_policy"]) == (NASTY, "polar", "never")
    assert (config["model_reasoning_effort"], config["model_reasoning_summary"]) == ("high", "none")
    assert config["model_context_window"] == 32768
    provider = config["model_providers"]["polar"]
    assert provider["base_url"] == "http://127.0.0.1:9/s/key/v1"
    assert (provider["env_key"], provider["wire_api"], provider["supports_websockets"]) == (
        *("OPENAI_API_KEY", "responses", False),
    )
    assert config["projects"] == {place.runtime.workdir: {"trust_level": "trusted"}}
    assert config["mcp_servers"] == {
        "one": {"command": "run", "args": ["-x", NASTY]},
        "two": {"url": "http://there/mcp"},
    }
    assert "sk-key" not in text


def test_what_is_not_set_is_left_to_codex(place: Workplace) -> None:
    """Without settings there is no word of them."""
    (text,) = codex().files(place).values()
    assert "reasoning" not in text
    assert "context_window" not in text


def test_it_is_started_without_anyone_to_ask(place: Workplace) -> None:
    """The command line has every option that keeps it from asking; the instruction comes by standard input."""
    harness = codex(settings={"install": False})
    assert harness.arguments(place) == [
        *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("--model", NASTY, "-"),
    ]
    assert harness.command(place).startswith("codex exec ")
    env = harness.env(place)
    assert (env["OPENAI_API_KEY"], env["CODEX_HOME"]) == ("sk-key", f"{place.runtime.home}/.codex")
    assert harness.packages() == ["@openai/codex@0.169.0"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"settings": {"reasoning_effort": "very"}}, "agent.settings.reasoning_effort"),
        ({"settings": {"version": "1; rm -rf"}}, "agent.settings.version"),
        ({"settings": {"effort": "high"}}, "agent.settings.effort"),
        ({"mcp_servers": [{"name": "m", "transport": "sse", "url": "http://x"}]}, "agent.mcp_servers.0.transport"),
        ({"mcp_servers": [{"name": "m m", "transport": "stdio", "command": "x"}]}, "agent.mcp_servers.0.name"),
    ],
)
def test_a_wrong_spec_is_refused_by_field(spec: dict[str, Any], field: str) -> None:
    """What Codex could not do is said at submit."""
    with pytest.raises(SpecError) as refused:
        codex(**spec)
    assert refused.value.errors[0][0].startswith(field)


@pytest.mark.parametrize(
    ("headers", "auxiliary", "subagent"),
    [
        ({}, None, None),
        ({"x-codex-turn-metadata": '{"request_kind":"turn"}'}, None, None),
        ({"x-codex-turn-metadata": '{"request_kind":"compaction"}'}, "compaction", None),
        ({"x-codex-turn-metadata": "not json"}, None, None),
        ({"x-codex-turn-metadata": "[1]"}, None, None),
        ({"x-openai-subagent": "compact"}, "compact", "compact"),
        ({"x-openai-subagent": "collab_spawn", "thread-id": "t"}, None, "collab_spawn t"),
        ({"x-openai-subagent": "review"}, None, "review"),
    ],
)
def test_roles(headers: dict[str, str], auxiliary: str | None, subagent: str | None) -> None:
    """Side calls and sub-agents are what Codex's own headers say they are."""
    assert (Codex.auxiliary(REQUEST, headers), Codex.subagent(REQUEST, headers)) == (auxiliary, subagent)
