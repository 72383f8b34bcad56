"""gemini_cli: how the program is started, and which of its calls stand aside. The real one runs in tests/harnesses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from polar import harnesses
from polar.dialects.google_generate import GoogleGenerate
from polar.errors import SpecError
from polar.harnesses import Workplace
from polar.harnesses.gemini_cli import GeminiCLI
from polar.harnesses.program import INSTRUCTION
from polar.spec import AgentSpec
from tests.unit.harnesses.rig import MCP

USER = {"role": "user", "parts": [{"text": "a"}]}


def made(settings: dict[str, Any] | None = None, **fields: Any) -> GeminiCLI:
    """The harness with these settings."""
    spec = AgentSpec.model_validate({"harness": "gemini_cli", "settings": settings or {}, **fields})
    harness = harnesses.create(spec)
    assert isinstance(harness, GeminiCLI)
    return harness


def stand_in(place: Workplace, script: str, settings: dict[str, Any] | None = None, **fields: Any) -> GeminiCLI:
    """The harness, set up, with a shell script for its program."""
    program = Path(place.runtime.workdir) / "bin" / "gemini"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    harness = made({"install": False, **(settings or {})}, env=env, **fields)
    harness.setup(place)
    return harness


def test_how_it_is_started(place: Workplace) -> None:
    """It asks nothing, has the session's model, and reads the instruction, which no shell and no option reader sees."""
    harness = made({"install": False})
    words = shlex.split(harness.command(place))
    assert words[:-1] == [
        *("gemini", "--approval-mode=yolo", "--model", "org/policy"),
        *("--output-format", "stream-json"),
    ]
    assert words[-1].endswith(INSTRUCTION)
    env = harness.env(place)
    assert (env["GOOGLE_GEMINI_BASE_URL"], env["GEMINI_API_KEY"]) == ("http://127.0.0.1:9/s/key", "sk-key")
    assert (env["GEMINI_SANDBOX"], env["GEMINI_CLI_HOME"]) == ("false", place.runtime.home)


def test_its_settings(place: Workplace) -> None:
    """Nothing is asked, sent home or updated, and whatever it runs is the session's model."""
    files = made({"max_turns": 5}, mcp_servers=MCP).files(place)
    settings = json.loads(files[".gemini/settings.json"])
    assert settings["security"] == {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}}
    assert not any(settings["general"][name] for name in ("enableAutoUpdate", "enableAutoUpdateNotification"))
    assert (settings["privacy"]["usageStatisticsEnabled"], settings["telemetry"]["enabled"]) == (False, False)
    assert settings["model"] == {"maxSessionTurns": 5}
    chosen = settings["modelConfigs"]["customOverrides"]
    assert {override["modelConfig"]["model"] for override in chosen} == {"org/policy"}
    assert settings["mcpServers"] == {
        "files": {"command": "serve", "args": ["--here"], "trust": True},
        "old": {"url": "http://x/sse", "trust": True},
        "web": {"httpUrl": "http://x/mcp", "trust": True},
    }
    assert "model" not in json.loads(made().files(place)[".gemini/settings.json"])


def test_skills_logs_and_exit_code(place: Workplace) -> None:
    """Skills are where it looks for them, the instruction is its input, and its exit code is believed."""
    assert place.runtime.exec("mkdir -p skills/greet && echo hi > skills/greet/SKILL.md", limits=place.limits).ok
    script = 'mkdir -p "$GEMINI_CLI_HOME/.gemini/tmp/p/chats"; cat > "$GEMINI_CLI_HOME/.gemini/tmp/p/chats/c"; exit 53'
    harness = stand_in(place, script, skills_path=f"{place.runtime.workdir}/skills")
    ended = harness.run(place)
    assert (ended.state, ended.exit_code, ended.detail) == ("failed", 53, {})
    assert (place.logs / "gemini-sessions" / "p" / "chats" / "c").read_text() == place.instruction
    assert (Path(place.runtime.home) / ".gemini" / "skills" / "greet" / "SKILL.md").read_text() == "hi\n"
    assert (Path(place.runtime.home) / ".gemini" / "settings.json").exists()


def test_what_it_says_of_its_end_is_kept(place: Workplace) -> None:
    """It ends with 0 also when it stopped itself: that it did is noted."""
    lines = [{"type": "message", "content": "a"}, {"type": "error", "message": "Loop detected"}, {"type": "result"}]
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines) + '\n{"type":"error","mess'
    harness = stand_in(place, f"cat <<'EOF'\n{text}\nEOF")
    ended = harness.run(place)
    assert (ended.state, ended.exit_code, ended.detail) == ("completed", 0, {"stopped": "Loop detected"})


def schema(**properties: Any) -> dict[str, Any]:
    """A request that is to be answered in JSON, as this program writes it."""
    asked = {"type": "OBJECT", "properties": properties, "required": list(properties)}
    return {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": asked}}


STRING = {"type": "STRING"}
TOOLS = [{"functionDeclarations": [{"name": "run_shell_command"}]}]
CHILD = [{"functionDeclarations": [{"name": "run_shell_command"}, {"name": "complete_task"}]}]


@pytest.mark.parametrize(
    ("body", "streams", "auxiliary", "subagent"),
    [
        ({"tools": TOOLS}, True, None, None),
        ({"tools": CHILD}, True, None, "agent"),
        (schema(reasoning=STRING, model_choice=STRING), False, "router: which model to take", None),
        (schema(complexity_reasoning=STRING, complexity_score=STRING), False, "router: how hard the task is", None),
        (schema(reasoning=STRING, next_speaker=STRING), False, "who speaks next", None),
        (schema(unproductive_state_analysis=STRING), False, "whether it turns in circles", None),
        (schema(search=STRING, noChangesRequired=STRING), False, "an edit that did not fit", None),
        ({"tools": [{"googleSearch": {}}]}, False, "web search", None),
        ({"tools": [{"urlContext": {}}]}, False, "web page", None),
        ({}, False, "a call without streaming: summary", None),
    ],
)
def test_roles(body: dict[str, Any], streams: bool, auxiliary: str | None, subagent: str | None) -> None:
    """What its requests look like tells what they are for."""
    params = {"model": "m", **({"stream": "yes", "alt": "sse"} if streams else {})}
    request = GoogleGenerate().parse({"contents": [USER], **body}, params)
    assert GeminiCLI.auxiliary(request, {}) == auxiliary
    assert GeminiCLI.subagent(request, {}) == subagent


@pytest.mark.parametrize(
    ("settings", "field"), [({"version": "1; rm -rf"}, "version"), ({"max_turns": 0}, "max_turns"), ({"x": 1}, "x")]
)
def test_wrong_settings(settings: dict[str, Any], field: str) -> None:
    """What cannot be is refused at submit, by name."""
    with pytest.raises(SpecError) as refused:
        made(settings)
    assert refused.value.errors[0][0] == f"agent.settings.{field}"
