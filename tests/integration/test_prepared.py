"""Prepared states and runtimes made ready ahead: done once, copied, and nothing of one session in another's."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from polar import runtimes
from polar.errors import LostLeaseError, PrepareError
from polar.lifecycle import Stage
from polar.runtimes import Limits, Runtime
from polar.stages import Job, prepared
from polar.stages.prepared import Bounds
from polar.stages.prewarm import evaluator_ahead, fresh_runtime, ready_evaluator
from tests.fakes.jobs import claimed
from tests.fakes.runtimes import HERE, spec_of

COPYING = [name for name in HERE if name != "apptainer"]
EVERYTHING = Bounds(states=100, megabytes=10_000, idle_seconds=1000)


@pytest.fixture(params=COPYING)
def backend(request: pytest.FixtureRequest) -> str:
    """Each runtime of this machine that copies prepared states."""
    return str(request.param)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A Polar home; its prepared states are removed at the end, with what runtimes keep elsewhere."""
    yield tmp_path / "home"
    prepared.trim(tmp_path / "home" / "prepared", EVERYTHING, everything=True)


def spec(backend: str, request: pytest.FixtureRequest, tmp_path: Path, *commands: str, **more: Any) -> dict[str, Any]:
    """A runtime whose steps upload a file and run commands, once."""
    tmp_path.joinpath("tool").write_text("tool\n") if not tmp_path.joinpath("tool").exists() else None
    steps = [{"type": "upload_file", "source": str(tmp_path / "tool"), "target": "tool"}]
    steps += [{"type": "exec", "command": command} for command in commands]
    return spec_of(backend, request, prepare=steps, prepare_once=True, **more).model_dump(mode="json")


def say(runtime: Runtime, command: str) -> str:
    """What a command prints."""
    result = runtime.exec(command, limits=Limits(30))
    assert result.ok, result.summary()
    return result.stdout


def test_steps_are_done_once_and_every_session_has_a_copy(
    database: Engine, home: Path, tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    """Sessions that come at the same time wait for the first; what one writes, anywhere, no later one sees."""
    asked = spec(backend, request, tmp_path, "sleep 0.5; date +%s%N >made; env >env; echo h >$HOME/h; echo t >/tmp/t")
    jobs = claimed(database, home, number=4, runtime=asked)
    with ThreadPoolExecutor(3) as pool:
        first = list(pool.map(lambda job: fresh_runtime(job, "agent"), jobs[:3]))
    made = {say(runtime, "cat made") for runtime in first}
    assert len(made) == 1
    for runtime in first:
        say(runtime, "echo secret | tee -a made tool $HOME/h $TMPDIR/left >new; mkdir -p ../up; echo x >../up/x")
    last = fresh_runtime(jobs[3], "agent")
    assert say(last, "cat made") == made.pop()
    assert say(last, "cat tool $HOME/h; ls -A . .. $TMPDIR $HOME").count("secret") == 0
    assert "left" not in say(last, "ls $TMPDIR")
    assert "up" not in say(last, "ls ..").split()
    for runtime in [*first, last]:
        runtime.destroy()


def test_the_steps_see_nothing_of_the_session_that_came_first(
    database: Engine, home: Path, tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    """No session id, task id or instruction is among their variables, and no file has the first session's id."""
    (job,) = claimed(database, home, runtime=spec(backend, request, tmp_path, "env >env"), instruction="do the secret")
    runtime = fresh_runtime(job, "agent")
    seen = say(runtime, "cat env")
    runtime.destroy()
    assert "SESSION_DIR=" in seen
    for unwanted in ("SESSION_ID", "TASK_ID", "INSTRUCTION", job.session.id, job.task.task_id + "\n", "secret"):
        assert unwanted not in seen


def test_another_file_step_or_setting_is_another_state(
    database: Engine, home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A byte of an upload, also one that keeps size and time, a step, or a variable makes a new one."""
    count = tmp_path / "count"
    step = f"echo x >>{count}"
    asked = spec("local", request, tmp_path, step)

    def states(asked: dict[str, Any]) -> int:
        (job,) = claimed(database, home, runtime=asked, task_id=f"task-{time.monotonic_ns()}")
        fresh_runtime(job, "agent").destroy()
        return len(count.read_text().splitlines())

    assert [states(asked), states(asked)] == [1, 1]
    about = (tmp_path / "tool").stat()
    (tmp_path / "tool").write_text("loot\n")
    os.utime(tmp_path / "tool", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert states(asked) == 2
    assert states({**asked, "env": {"A": "1"}}) == 3
    assert states({**asked, "prepare": asked["prepare"][::-1]}) == 4
    assert states({**asked, "eval_prepare": []}) == 4


def test_a_step_that_fails_is_the_sessions_failure_and_nothing_is_kept(
    database: Engine, home: Path, tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    """The next session tries for itself; no state, no runtime, no handle stays."""
    jobs = claimed(database, home, number=2, runtime=spec(backend, request, tmp_path, "echo broken >&2; exit 3"))
    for job in jobs:
        with pytest.raises(PrepareError, match="broken"):
            fresh_runtime(job, "agent")
        runtimes.attach(job.handles["agent"]).destroy()
    assert [path.name for path in (home / "prepared").iterdir() if path.suffix != ".lock"] == []


def test_a_state_goes_when_there_are_too_many_or_nobody_wants_it(
    database: Engine, home: Path, tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    """By number, by size, by age, and all when a node drains; one that is being copied stays until it is done."""
    folder = home / "prepared"

    def kept() -> list[str]:
        return sorted(path.parent.name for path in folder.glob("*/.ready"))

    def make(name: str) -> str:
        before = set(kept())
        asked = spec(backend, request, tmp_path, f"echo {name} >name; head -c 3000000 /dev/urandom >big")
        (job,) = claimed(database, home, runtime=asked, task_id=f"task-{name}")
        fresh_runtime(job, "agent").destroy()
        (new,) = set(kept()) - before
        return new

    one, two = make("one"), make("two")
    assert int((folder / one / "bytes").read_text()) > 3_000_000
    assert prepared.trim(folder, EVERYTHING) == 0
    with prepared.state(folder, one, Limits(5), lambda place: None):
        assert prepared.trim(folder, EVERYTHING, everything=True) == (1 if one[:2] != two[:2] else 0)
        assert one in kept()
    three = make("three")
    os.utime(folder / one / ".ready", (1, 1))
    assert prepared.trim(folder, Bounds(100, 10_000, 1000)) == 1
    four = make("four")
    os.utime(folder / three / ".ready", (time.time() - 10,) * 2)
    assert prepared.trim(folder, Bounds(1, 10_000, 1000)) >= 1
    assert kept() == [four]
    assert prepared.trim(folder, Bounds(100, 1, 1000)) == 1
    assert kept() == []


def test_what_a_dead_worker_left_half_made_is_removed(
    database: Engine, home: Path, tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    """Its runtime is ended by the handle beside the state, by the next maker or the sweep."""
    made = runtimes.create(spec_of(backend, request), "prepared-x", home / "prepared" / "abc.maker")
    (home / "prepared").mkdir(parents=True)
    (home / "prepared" / "abc.json").write_text(json.dumps(made.handle()))
    made.start(Limits(30))
    assert prepared.half_made(home / "prepared") == {made.workspace}
    assert prepared.trim(home / "prepared", EVERYTHING) == 1
    assert not made.workspace.exists()
    assert prepared.half_made(home / "prepared") == set()


def test_a_session_that_ends_while_it_waits_for_a_state_stops_waiting(tmp_path: Path) -> None:
    """Cancelled: at once; without time: with the reason."""
    making, done = threading.Event(), threading.Event()

    def make(place: Path) -> None:
        making.set()
        done.wait(20)

    def first() -> None:
        with prepared.state(tmp_path, "k1", Limits(30), make):
            pass

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first)
        assert making.wait(5)
        stopped = Limits(30)
        stopped.cancelled.set()
        with pytest.raises(LostLeaseError), prepared.state(tmp_path, "k1", stopped, make):
            pass
        with pytest.raises(TimeoutError), prepared.state(tmp_path, "k1", Limits(0.2), make):
            pass
        done.set()
        running.result()


def evaluated(database: Engine, home: Path, **runtime: Any) -> Job:
    """A session in execute whose evaluator wants a fresh runtime."""
    judge = {"strategy": "session_completed", "refresh_runtime": True}
    (job,) = claimed(database, home, Stage.EXECUTE, runtime={"backend": "local", **runtime}, evaluator=judge)
    return job


def again(job: Job, stage_attempt: int) -> Job:
    """The same session as another worker finds it later."""
    job.session.runtimes = dict(job.handles)
    job.session.attempt, job.session.execute_attempt = stage_attempt, 1
    return Job(job.session, job.task, job.database, job.settings, job.node, job.lane, threading.Event())


def test_the_evaluators_runtime_is_made_ready_while_the_agent_runs(database: Engine, home: Path) -> None:
    """And used by the first evaluation alone: whoever evaluates again gets a fresh one."""
    steps = {"eval_prepare": [{"type": "exec", "command": "sleep 0.5; echo ready >ready"}]}
    job = evaluated(database, home, **steps)
    started = time.monotonic()
    with evaluator_ahead(job):
        job.keep("agent", {**job.handles.get("agent", {}), "note": "written meanwhile"})
        time.sleep(0.5)
    assert time.monotonic() - started < 0.95
    job.write(lambda db, row: job.handles.update(row.runtimes))
    assert job.handles["agent"]["note"] == "written meanwhile"
    handle = job.handles.pop("agent") and job.handles["evaluator"]
    assert handle["ready_for"] == 1
    evaluating = again(job, 1)
    runtime = ready_evaluator(evaluating)
    assert str(runtime.workspace) == handle["workspace"]
    assert say(runtime, "cat ready; echo judged >ready") == "ready\n"
    fresh = ready_evaluator(again(evaluating, 1))
    assert say(fresh, "cat ready") == "ready\n"
    fresh.destroy()


def test_an_evaluators_runtime_that_fails_ahead_fails_in_evaluate(database: Engine, home: Path) -> None:
    """The agent's run is not disturbed by it."""
    job = evaluated(database, home, eval_prepare=[{"type": "exec", "command": "exit 9"}])
    with evaluator_ahead(job):
        pass
    job.write(lambda db, row: job.handles.update(row.runtimes))
    assert "ready_for" not in job.handles["evaluator"]
    with pytest.raises(PrepareError, match="exited with 9"):
        ready_evaluator(again(job, 1))


def test_an_agent_that_fails_does_not_wait_for_its_evaluator(database: Engine, home: Path) -> None:
    """What is being made ready is stopped."""
    job = evaluated(database, home, eval_prepare=[{"type": "exec", "command": "sleep 60"}])
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="agent"), evaluator_ahead(job):
        time.sleep(0.3)
        raise RuntimeError("agent")
    assert time.monotonic() - started < 10
