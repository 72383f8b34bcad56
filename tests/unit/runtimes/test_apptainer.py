"""Apptainer by its command lines, with a program that writes them down: the real one is not to be had everywhere.

The program keeps an "instance" as a process and runs commands on the node, so what is shown here is what the runtime
asks for, passes on, and makes of the answers; what Apptainer does with it, the contract suite asks where it is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar import runtimes
from polar.errors import RuntimeFault
from polar.runtimes import Limits, Runtime, apptainer
from polar.spec import RuntimeSpec

PROGRAM = """\
#!{python} -S
import json, os, subprocess, sys
folder = {folder!r}
words = sys.argv[1:]
with open(folder + "/said", "a") as said:
    print(json.dumps(words), file=said)
state = folder + "/instance.json"
refuse = folder + "/refuse"
if words[:2] == ["instance", "start"]:
    if os.path.exists(refuse):
        sys.exit(open(refuse).read())
    there = subprocess.Popen(["sleep", "1234.5"], stdout=-3, stderr=-3, start_new_session=True)
    open(state, "w").write(json.dumps({{"instance": words[-1], "pid": there.pid, "img": words[-2]}}))
elif words[:2] == ["instance", "list"]:
    found = [json.load(open(state))] if os.path.exists(state) else []
    print(json.dumps({{"instances": found}}) if not os.path.exists(folder + "/garbled") else "FATAL: no")
elif words[:2] == ["instance", "stop"]:
    os.kill(json.load(open(state))["pid"], 9)
    os.unlink(state)
elif words[0] == "exec":
    place = next(number for number, word in enumerate(words) if word.startswith("instance://"))
    prefix = "APPTAINERENV_"
    given = {{name[len(prefix):]: value for name, value in os.environ.items() if name.startswith(prefix)}}
    inner = [word.replace("/polar/", folder + "/polar/") for word in words[place + 1:]]
    os.execvpe(inner[0], inner, {{"PATH": os.environ["PATH"], **given}})
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program that is found as apptainer; "/polar/" inside is a folder of it."""
    folder = tmp_path / "program"
    (folder / "polar").mkdir(parents=True)
    path = folder / "apptainer"
    path.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(shutil.which('sh') or '/bin/sh').parent}:/usr/bin:/bin")
    apptainer._program.cache_clear()
    yield folder
    apptainer._program.cache_clear()


def said(folder: Path) -> list[list[str]]:
    """The command lines so far."""
    return [json.loads(line) for line in (folder / "said").read_text().splitlines()]


@pytest.fixture
def started(program: Path, tmp_path: Path) -> Iterator[Runtime]:
    """A started runtime."""
    runtime = runtimes.create(RuntimeSpec(backend="apptainer", image="x.sif"), "s", tmp_path / "workspace")
    runtime.start(Limits(20))
    yield runtime
    runtime.destroy()


def lines(tmp_path: Path, **asked: Any) -> list[str]:
    """The command lines of a start, as text."""
    runtime = runtimes.create(RuntimeSpec(backend="apptainer", image="x.sif", **asked), "s", tmp_path / "w")
    assert isinstance(runtime, apptainer.ApptainerRuntime)
    runtime.exposable = (Path("/cache"),)
    return [" ".join(words) for words in runtime.start_commands()]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"network": "none"}, "--net --network none"),
        ({"allow_internet": False}, "--net --network none"),
        ({"gpus": 1}, "--nv"),
        ({"cpus": 2, "memory_mb": 512, "pids": 99}, "--cpus 2 --memory 512M --pids-limit 99"),
        ({"kwargs": {"volumes": ["/a:/b:ro"]}}, "--bind /a:/b:ro"),
        ({"kwargs": {"fakeroot": True}}, "--fakeroot"),
        ({}, "--bind /cache:/cache:ro"),
    ],
)
def test_what_is_asked_for_stands_in_the_command_line(tmp_path: Path, asked: dict[str, Any], expected: str) -> None:
    """Before the image and the instance's name, which come last; nothing else of the node is shown."""
    make, start = lines(tmp_path, **asked)
    assert make.startswith("mkdir -p ")
    assert f" {expected} " in f"{start} "
    assert "--containall --cleanenv --overlay" in start
    assert start.split()[-2] == "x.sif"
    assert ("--net" in start) == (asked.get("network") == "none" or asked.get("allow_internet") is False)


def test_storage_is_an_overlay_of_that_size(tmp_path: Path) -> None:
    """A file system in a file, made before the instance."""
    make, start = lines(tmp_path, storage_mb=300)
    assert " overlay create --size 300 " in make
    assert f"--overlay {make.split()[-1]}" in start


def test_commands_have_their_variables_and_their_own_exit_code(program: Path, started: Runtime) -> None:
    """Variables go by the prefix that Apptainer takes off, none of the worker's among them."""
    result = started.exec("echo $A:$HOME:$POLAR_DATABASE_URL; exit 7", env={"A": "1,2=3"}, cwd="/", limits=Limits(20))
    assert (result.stdout, result.exit_code) == ("1,2=3:/polar/home:\n", 7)
    words = said(program)[-1]
    assert words[:4] == ["exec", "--cleanenv", "--pwd", "/"]


def test_a_time_out_ends_the_tree_that_it_started(started: Runtime) -> None:
    """Found by the marker, which went through the prefix, too."""
    result = started.exec("setsid sleep 4321.5 & sleep 4321.5", cwd="/", limits=Limits(1.0))
    assert result.timed_out
    assert started.exec("pgrep -f 'sleep 4321.5' | grep -v $$ | wc -l", cwd="/", limits=Limits(20)).stdout == "0\n"


def test_the_instance_goes_with_the_runtime(program: Path, started: Runtime) -> None:
    """It is stopped once, by its name, and a second destroy does nothing."""
    name = next(words for words in said(program) if words[:2] == ["instance", "start"])[-1]
    started.destroy()
    assert ["instance", "stop", "--signal", "SIGKILL", name] in said(program)
    started.destroy()
    assert not started.workspace.exists()
    with pytest.raises(RuntimeFault, match="gone"):
        started.exec("true", limits=Limits(5))


def test_a_start_that_fails_says_why(program: Path, tmp_path: Path) -> None:
    """Its words, the image, and that limits need cgroups."""
    (program / "refuse").write_text("FATAL: could not open image")
    runtime = runtimes.create(RuntimeSpec(backend="apptainer", image="no.sif"), "s", tmp_path / "workspace")
    with pytest.raises(RuntimeFault, match=r"exited with 1: FATAL: could not open image; image no.sif") as fault:
        runtime.start(Limits(20))
    assert not fault.value.retryable
    runtime.destroy()


def test_an_answer_that_is_no_list_is_a_fault(program: Path, started: Runtime) -> None:
    """Not taken for an instance that is gone: that would leave it running."""
    (program / "garbled").touch()
    with pytest.raises(RuntimeFault, match="instance list"):
        started.destroy()
    (program / "garbled").unlink()


def test_without_apptainer_a_node_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At doctor, and when a session wants it there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    apptainer._program.cache_clear()
    runtime = runtimes.create(RuntimeSpec(backend="apptainer", image="x.sif"), "s", tmp_path / "workspace")
    assert "docs/runtimes.md" in str(runtime.unavailable())
    with pytest.raises(RuntimeFault, match="not installed"):
        runtime.start(Limits(5))
    runtime.destroy()
    apptainer._program.cache_clear()
