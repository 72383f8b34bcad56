"""What every harness promises, and each member's own way of being started. Real programs run in the e2e tests."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar import harnesses, runtimes
from polar.errors import HarnessError, SpecError
from polar.harnesses import HARNESSES, Connection, Workplace
from polar.harnesses.mini_swe_agent import TRAJECTORY, MiniSweAgent
from polar.runtimes import Limits
from polar.spec import AgentSpec, RuntimeSpec

NASTY = 'It\'s "bad"; $(touch hacked) `touch hacked` \\ && \n second line {{model}} é'


def shell(command: str, **extra: Any) -> AgentSpec:
    return AgentSpec.model_validate({"harness": "shell", "custom_shell": {"command": command, **extra}})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A session's workplace in a local runtime, with no model behind its address."""
    runtime = runtimes.create(RuntimeSpec(backend="local"), "s", tmp_path / "workspace")
    runtime.start(Limits())
    yield Workplace(
        runtime=runtime,
        connection=Connection("http://127.0.0.1:9/s/key", "sk-'key", "policy"),
        instruction=NASTY,
        env={"SESSION_ID": "s"},
        limits=Limits(30),
        logs=tmp_path / "logs",
        cache=tmp_path / "cache",
    )
    runtime.destroy()


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_every_name_is_a_harness(name: str) -> None:
    """A member is made from its name alone, or with the one thing it needs, and says its name."""
    spec = shell("true") if name == "shell" else AgentSpec(harness=name)
    assert harnesses.create(spec).name == name


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"harness": "nonsense"}, "agent.harness"),
        ({"import_path": "no.such:Class"}, "agent.import_path"),
        ({"import_path": "polar.spec:AgentSpec"}, "agent.import_path"),
        ({"harness": "mini_swe_agent", "settings": {"steplimit": 3}}, "agent.settings.steplimit"),
        ({"harness": "mini_swe_agent", "settings": {"step_limit": 0}}, "agent.settings.step_limit"),
        ({"harness": "mini_swe_agent", "settings": {"version": "1; rm -rf"}}, "agent.settings.version"),
        ({"harness": "mini_swe_agent", "skills_path": "/skills"}, "agent.skills_path"),
        (
            {"harness": "mini_swe_agent", "mcp_servers": [{"name": "m", "transport": "stdio", "command": "x"}]},
            "agent.mcp_servers",
        ),
        ({"harness": "shell", "custom_shell": {"command": "run {{prompt}}"}}, "agent.custom_shell.command"),
        ({"harness": "shell", "custom_shell": {"command": "x"}, "settings": {"a": 1}}, "agent.settings"),
    ],
)
def test_a_wrong_spec_is_refused_by_field(asked: dict[str, Any], field: str) -> None:
    """What cannot be is said at submit, and the field is named."""
    with pytest.raises(SpecError) as refused:
        harnesses.create(AgentSpec.model_validate(asked))
    assert refused.value.errors[0][0].startswith(field)


def test_an_unknown_placeholder_is_named() -> None:
    """The message has the placeholder as it was written, and the ones there are."""
    with pytest.raises(SpecError, match=r"\{\{prompt\}\} is not known; there are \{\{instruction\}\}, "):
        harnesses.create(shell("run {{prompt}}"))


@pytest.mark.parametrize(
    "command",
    [
        "printf %s {{instruction}}",
        'printf %s "{{ INSTRUCTION }}"',
        "printf %s '{{instruction}}'",
        'printf %s "$(printf %s "{{instruction}}")"',
        "# don't be fooled by this\nprintf %s {{instruction}}",
        'printf %s a#\'b\' >/dev/null; printf %s "it\'s" >/dev/null; printf %s "{{instruction}}"',
        "(printf %s \\' >/dev/null; printf %s {{instruction}})",
        'printf %s "$INSTRUCTION"',
    ],
)
def test_a_nasty_instruction_arrives_unchanged(place: Workplace, command: str) -> None:
    """Quotes, substitutions and newlines of an instruction are data, however the placeholder is quoted."""
    ended = harnesses.create(shell(command)).run(place)
    assert ended.state == "completed"
    assert (place.logs / "agent.stdout").read_text() == NASTY
    assert not place.runtime.exec("test -e hacked", limits=Limits(20)).ok


def test_all_placeholders_and_variables_of_the_shell(place: Workplace) -> None:
    """Address, key and model are filled in; the command's own variables and folder win."""
    place.runtime.exec("mkdir sub", limits=Limits(20))
    command = 'printf \'%s|\' {{base_url}} {{api_key}} {{model}} "$OPENAI_BASE_URL" "$SESSION_ID"; basename "$PWD"'
    ended = harnesses.create(shell(command, cwd="sub", env={"SESSION_ID": "mine"})).run(place)
    assert ended.state == "completed"
    said = (place.logs / "agent.stdout").read_text()
    assert said == "http://127.0.0.1:9/s/key|sk-'key|policy|http://127.0.0.1:9/s/key/v1|mine|sub\n"


def test_an_exit_code_is_never_masked(place: Workplace) -> None:
    """A failing program is a failed agent with that exit code and its last words."""
    ended = harnesses.create(shell("echo it broke >&2; exit 3")).run(place)
    assert (ended.state, ended.exit_code) == ("failed", 3)
    assert ended.error == "the shell command exited with 3: it broke"


def test_the_agents_time_and_its_cancellation_end_it(place: Workplace) -> None:
    """A time-out and a stop are told apart, and neither has an exit code."""
    place = replace(place, limits=Limits(0.5))
    ended = harnesses.create(shell("sleep 30")).run(place)
    assert (ended.state, ended.exit_code) == ("timed_out", None)
    place.limits.cancelled.set()
    assert harnesses.create(shell("sleep 30")).run(place).state == "cancelled"


def fake_install(place: Workplace, script: str) -> MiniSweAgent:
    """A mini_swe_agent whose installed program is a shell script."""
    harness = harnesses.create(AgentSpec(harness="mini_swe_agent", settings={"step_limit": 5, "config": "a.b=1"}))
    assert isinstance(harness, MiniSweAgent)
    folder = harness.folder(place)
    (folder / "bin").mkdir(parents=True)
    (folder / ".ready").touch()
    (folder / "bin" / "mini").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "mini").chmod(0o755)
    builtin = folder / "lib/python3.11/site-packages/minisweagent/config/mini.yaml"
    builtin.parent.mkdir(parents=True)
    builtin.touch()
    return harness


def test_mini_swe_agent_is_started_without_a_terminal_and_without_limits_of_cost(place: Workplace) -> None:
    """The command line has every option that keeps it from asking, and the instruction as one word."""
    harness = fake_install(place, "true")
    words = shlex.split(harness.command(place))
    assert words[1:8] == ["-m", "openai/policy", "-t", NASTY, "-y", "--exit-immediately", "-l"]
    assert words[8:10] == ["0", "-o"]
    assert words[11::2] == ["-c", "-c", "-c"]
    assert words[12].endswith("/minisweagent/config/mini.yaml")
    assert words[14::2] == ["a.b=1", "agent.step_limit=5"]
    env = harness.env(place)
    assert env["OPENAI_API_BASE"] == "http://127.0.0.1:9/s/key/v1"
    assert env["OPENAI_API_KEY"] == "sk-'key"
    assert (env["MSWEA_CONFIGURED"], env["MSWEA_COST_TRACKING"]) == ("true", "ignore_errors")
    assert env["MSWEA_GLOBAL_CONFIG_DIR"].startswith(place.runtime.home)
    assert env["SESSION_ID"] == "s"


def test_mini_swe_agent_keeps_its_trajectory_and_how_it_says_it_ended(place: Workplace) -> None:
    """An exit code of 0 can also mean that it hit its own limits: what it says itself is noted."""
    harness = fake_install(
        place, 'echo \'{"info": {"exit_status": "LimitsExceeded"}}\' > "$10"'.replace("$10", "${10}")
    )
    harness.setup(place)
    ended = harness.run(place)
    assert (ended.state, ended.detail) == ("completed", {"exit_status": "LimitsExceeded"})
    harness.collect(place)
    assert (place.logs / TRAJECTORY).exists()


def test_mini_swe_agent_that_is_not_in_the_runtime_says_so(place: Workplace) -> None:
    """With install false the program must be there already."""
    harness = harnesses.create(AgentSpec(harness="mini_swe_agent", settings={"install": False}))
    with pytest.raises(HarnessError, match="not on PATH"):
        harness.setup(place)
