"""What every runtime promises, asked of each that this machine can run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar import runtimes
from polar.errors import RuntimeFault
from polar.runtimes import RUNTIMES, Limits, Runtime
from polar.spec import RuntimeSpec
from tests.fakes.runtimes import HERE, spec_of, why_not

DAEMON = "setsid sleep {seconds} >/dev/null 2>&1 & "
FORGETFUL = "env -i setsid sleep {seconds} >/dev/null 2>&1 & "


def alive(seconds: str) -> list[int]:
    """Processes `sleep <seconds>` of this machine; each test sleeps for a number of its own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[-2:] == [seconds.encode(), b""] and words[0].endswith(b"sleep"):
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(params=HERE)
def spec(request: pytest.FixtureRequest) -> RuntimeSpec:
    """A plain spec of a runtime that runs here."""
    return spec_of(request.param, request)


@pytest.fixture
def runtime(spec: RuntimeSpec, tmp_path: Path) -> Iterator[Runtime]:
    """A started runtime."""
    made = runtimes.create(spec, "session-1", tmp_path / "workspace")
    made.start(Limits(30))
    yield made
    made.destroy()


@pytest.fixture
def nap(request: pytest.FixtureRequest) -> str:
    """A number of seconds that no other test sleeps for."""
    return f"{3000 + abs(hash(request.node.nodeid)) % 10_000_000 / 10_000_000 + os.getpid():.7f}"


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_every_runtime_runs_here(name: str) -> None:
    """The suites are run over every runtime that this machine can run; for another the skip says what it lacks."""
    why = why_not(name)
    if why is not None:
        pytest.skip(why)
    assert name in HERE


def test_a_command_gives_its_output_and_its_own_exit_code(runtime: Runtime) -> None:
    """Both streams come back apart, and the exit code is the program's."""
    result = runtime.exec("echo out; echo err >&2; exit 7", limits=Limits(20))
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 7, False)


def test_a_death_by_signal_is_no_success(runtime: Runtime) -> None:
    """A program that is killed by a signal has an exit code over 128, as in a shell."""
    assert runtime.exec("kill -KILL $$", limits=Limits(20)).exit_code == 128 + signal.SIGKILL


def test_a_command_runs_in_the_workdir_or_where_it_is_told(runtime: Runtime) -> None:
    """Without cwd the workdir; with one, that; a relative one is below the workdir."""
    made = runtime.exec("pwd; mkdir 'a b'", limits=Limits(20))
    assert made.stdout.strip() == runtime.workdir
    assert runtime.exec("pwd", cwd="a b", limits=Limits(20)).stdout.strip() == f"{runtime.workdir}/a b"
    assert runtime.exec("pwd", cwd="/polar/session/a b", limits=Limits(20)).stdout.endswith("/a b\n")
    missing = runtime.exec("echo never", cwd="nowhere", limits=Limits(20))
    assert missing.exit_code == 126
    assert missing.stdout == ""


def test_a_command_has_the_variables_given_and_none_of_the_worker(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is made from nothing: the worker's secrets are not in it, HOME is the runtime's."""
    monkeypatch.setenv("POLAR_DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("POLAR_WEBHOOK_SECRET", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    seen = runtime.exec("env -0", env={"GIVEN": "a 'b'\n$c"}, limits=Limits(20)).stdout.split("\0")
    assert "GIVEN=a 'b'\n$c" in seen
    assert f"HOME={runtime.home}" in seen
    assert "PIP_INDEX_URL=https://index.example/simple" in seen
    assert not any("secret" in variable for variable in seen)


def test_a_command_has_nothing_to_read(runtime: Runtime) -> None:
    """Input is at its end, so nothing waits for a person."""
    assert runtime.exec("cat; echo done", limits=Limits(20)).stdout == "done\n"


def test_output_goes_to_the_log(runtime: Runtime, tmp_path: Path) -> None:
    """The log has both streams whole, and can be read while the command runs."""
    log = tmp_path / "logs" / "step"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runtime.exec, "echo early; sleep 1; echo late >&2", limits=Limits(20), log=log)
        assert wait_for(lambda: log.with_name("step.stdout").exists() and log.with_name("step.stdout").read_text())
        assert not running.done()
    assert log.with_name("step.stdout").read_text() == "early\n"
    assert log.with_name("step.stderr").read_text() == "late\n"


def test_a_long_output_is_cut_in_the_middle_and_says_so(runtime: Runtime, tmp_path: Path) -> None:
    """Five megabytes neither block nor fill the memory; head and tail stay, the log has all."""
    log = tmp_path / "long"
    script = "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last"
    result = runtime.exec(script, limits=Limits(30), log=log)
    assert result.stdout.startswith("first\nxxx")
    assert result.stdout.endswith("xxx\nlast\n")
    assert "bytes cut out here" in result.stdout
    assert len(result.stdout) < 1_001_000
    assert log.with_name("long.stdout").stat().st_size == 5_000_012


def test_output_that_is_no_text_does_no_harm(runtime: Runtime) -> None:
    """Bytes that are not UTF-8 are replaced."""
    assert runtime.exec("printf 'a\\377b'", limits=Limits(20)).stdout == "a\N{REPLACEMENT CHARACTER}b"


def test_a_time_out_ends_the_whole_tree(runtime: Runtime, nap: str) -> None:
    """Children and daemons in sessions of their own die with the command, and it has no exit code."""
    script = DAEMON.format(seconds=nap) + f"sleep {nap} & trap '' TERM; sleep {nap}"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runtime.exec, script, limits=Limits(1.0))
        assert wait_for(lambda: len(alive(nap)) == 3)
        result = running.result()
    assert (result.timed_out, result.cancelled, result.exit_code) == (True, False, None)
    assert result.seconds < 6
    assert alive(nap) == []


def test_a_time_out_lets_a_program_say_goodbye(runtime: Runtime) -> None:
    """A program that listens to SIGTERM has time to write its last words."""
    script = "trap 'echo bye; exit 0' TERM; sleep 30 & wait"
    result = runtime.exec(script, limits=Limits(3.0))
    assert result.timed_out
    assert result.stdout == "bye\n"


def test_cancellation_ends_a_command(runtime: Runtime, nap: str) -> None:
    """A flag set by another thread ends the command soon, and the result says so."""
    limits = Limits(60, threading.Event())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runtime.exec, f"sleep {nap}", limits=limits)
        assert wait_for(lambda: alive(nap))
        limits.cancelled.set()
        result = running.result(timeout=10)
    assert (result.cancelled, result.timed_out, result.exit_code) == (True, False, None)
    assert alive(nap) == []
    assert runtime.exec("echo never", limits=limits).cancelled


def test_no_time_left_starts_nothing(runtime: Runtime) -> None:
    """A command whose budget is used up does not begin."""
    result = runtime.exec("touch began", limits=Limits(0))
    assert result.timed_out
    assert not runtime.exec("test -e began", limits=Limits(20)).ok


def test_commands_run_side_by_side(runtime: Runtime, nap: str) -> None:
    """Eight at once do not disturb each other, and a time-out of one ends only that one."""
    with ThreadPoolExecutor(9) as pool:
        short = pool.submit(runtime.exec, f"sleep {nap}", limits=Limits(0.3))
        others = [pool.submit(runtime.exec, f"sleep 1; echo {i}", limits=Limits(20)) for i in range(8)]
        assert [run.result().stdout for run in others] == [f"{i}\n" for i in range(8)]
    assert short.result().timed_out


def test_a_background_process_does_not_hold_up_its_command(runtime: Runtime, nap: str) -> None:
    """A command ends when its first process does, though a daemon keeps its output open; kill_all ends that."""
    result = runtime.exec(f"setsid sleep {nap} & echo started", limits=Limits(20))
    assert (result.stdout, result.exit_code) == ("started\n", 0)
    assert result.seconds < 5
    runtime.kill_all()
    assert alive(nap) == []
    assert runtime.exec("echo still here", limits=Limits(20)).ok


def test_kill_all_finds_a_daemon_that_dropped_its_environment(runtime: Runtime, nap: str) -> None:
    """Neither a cleared environment nor a session of its own hides a process."""
    assert runtime.exec(FORGETFUL.format(seconds=nap) + "sleep 0.2", limits=Limits(20)).ok
    runtime.kill_all()
    assert alive(nap) == []


def test_an_exposed_folder_can_be_read_inside(runtime: Runtime, tmp_path: Path) -> None:
    """expose gives the path at which a folder of the node is found by later commands."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "hello").write_text("hello\n")
    assert runtime.exec(f"cat {runtime.expose(programs)}/hello", limits=Limits(20)).stdout == "hello\n"


def test_destroy_leaves_nothing_and_may_be_repeated(runtime: Runtime, nap: str) -> None:
    """No process and no folder, whatever modes the agent set; a second call does nothing."""
    runtime.exec(DAEMON.format(seconds=nap) + "mkdir -p shut/in; touch shut/in/x; chmod 0 shut/in", limits=Limits(20))
    runtime.destroy()
    runtime.destroy()
    assert alive(nap) == []
    assert not runtime.workspace.exists()
    with pytest.raises(RuntimeFault):
        runtime.exec("true", limits=Limits(20))


def test_another_process_takes_up_what_a_killed_one_left(spec: RuntimeSpec, tmp_path: Path, nap: str) -> None:
    """After SIGKILL of the starter the command lives on; attaching to the handle ends it and removes all."""
    spec = spec.model_copy(update={"env": {"A": "1"}})
    handle = runtimes.create(spec, "session-2", tmp_path / "workspace").handle()
    starter = (
        "import json, sys; from polar import runtimes; r = runtimes.attach(json.loads(sys.argv[1])); "
        f"r.start(runtimes.Limits()); r.exec('{DAEMON.format(seconds=nap)} sleep {nap}', limits=runtimes.Limits())"
    )
    process = subprocess.Popen([sys.executable, "-c", starter, json.dumps(handle)])
    assert wait_for(lambda: len(alive(nap)) == 2, 20)
    process.kill()
    process.wait()
    assert len(alive(nap)) == 2
    attached = runtimes.attach(json.loads(json.dumps(handle)))
    assert attached.spec == spec
    assert attached.exec("echo taken up", limits=Limits(20)).ok
    attached.destroy()
    assert alive(nap) == []
    assert not attached.workspace.exists()


def test_limits_on_memory_and_processors_hold(spec: RuntimeSpec, tmp_path: Path) -> None:
    """A process that wants more memory than allowed is refused it or killed; cpus bounds what all may use."""
    spec = spec.model_copy(update={"memory_mb": 128, "cpus": 1})
    runtimes.check(spec)
    made = runtimes.create(spec, "session-3", tmp_path / "workspace")
    made.start(Limits(30))
    try:
        greedy = made.exec("python -c 'bytearray(400_000_000)'", limits=Limits(30))
        assert not greedy.ok
        assert "MemoryError" in greedy.stderr or greedy.exit_code == 128 + signal.SIGKILL
        assert made.exec("python -c 'bytearray(40_000_000)'", limits=Limits(30)).ok
        spin = "timeout 1.5 sh -c 'while :; do :; done' & "
        used = made.exec(f"{spin * 4} wait; times | tail -1", limits=Limits(30)).stdout.split()
        # The shell's children, user and system, over 1.5 s of four of them; a little is allowed for the clocks.
        assert sum(60 * float(part.partition("m")[0]) + float(part.partition("m")[2][:-1]) for part in used) < 2.0
    finally:
        made.destroy()


def test_a_command_that_cannot_be_started_is_a_fault(runtime: Runtime) -> None:
    """What the kernel refuses before a program runs is not an exit code."""
    with pytest.raises(RuntimeFault, match="cannot start") as fault:
        runtime.exec("true", env={"LONG": "x" * 200_000}, limits=Limits(20))
    assert not fault.value.retryable
