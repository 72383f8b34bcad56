"""The task that lies in examples/ runs unchanged under Harbor's own code, and Polar comes to the same reward."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar.cli.client import load_task
from polar.evaluators.base import Case
from polar.evaluators.harbor import Harbor
from polar.runtimes.base import Limits
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.spec import parse_task

pytestmark = pytest.mark.e2e
EXAMPLE = Path(__file__).parents[2] / "examples/harbor_task"
TASK = EXAMPLE / "task"
PACKAGE = "harbor >=0.20"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the package, which wants 3.12 and so cannot live beside Polar's."""
    if BubblewrapRuntime.unavailable() is not None:
        pytest.skip("bubblewrap does not run here")
    uv = [sys.executable, "-m", "uv"]
    found = subprocess.run([*uv, "python", "find", "--no-project", ">=3.12"], capture_output=True, text=True)
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python3"))
    newer = found.stdout.strip() if found.returncode == 0 else str(pyenv[0]) if pyenv else None
    if newer is None:
        pytest.skip("harbor needs Python 3.12 or newer, and there is none here")
    folder = tmp_path_factory.mktemp("harbor") / "venv"
    subprocess.run([newer, "-m", "venv", str(folder)], check=True)
    installed = subprocess.run([*uv, "pip", "install", "-q", "--python", str(folder / "bin/python"), PACKAGE])
    if installed.returncode != 0:
        pytest.skip("the package harbor cannot be installed here")
    return str(folder / "bin/python")


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[BubblewrapRuntime]:
    """The example's own sandbox, prepared as its task.yaml says."""
    spec = parse_task(load_task(EXAMPLE / "task.yaml")).runtime
    assert spec is not None
    made = BubblewrapRuntime(spec, "ses", tmp_path / "runtime")
    made.start(Limits(60))
    for action in spec.prepare:
        made.upload(Path(str(action.source)), str(action.target))
    yield made
    made.destroy()


@pytest.mark.parametrize(("solve", "reward"), [(True, 1.0), (False, 0.0)])
def test_both_come_to_the_same_reward(
    python: str, runtime: BubblewrapRuntime, tmp_path: Path, solve: bool, reward: float
) -> None:
    """With the task's own solution, and with nothing done at all."""
    script = Path(__file__).parent / "verify.py"
    argv = [python, str(script), str(TASK), str(tmp_path / "theirs"), *(["solve"] if solve else [])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    if solve:
        shutil.copytree(TASK / "solution", tmp_path / "solution")
        runtime.upload(tmp_path / "solution", "/solution")
        assert runtime.exec("bash /solution/solve.sh", limits=Limits(60)).ok
    values: dict[str, Any] = {"session_id": "ses", "traces": [], "agent_exit": {}, "env": {}, "limits": Limits(100)}
    task = parse_task(load_task(EXAMPLE / "task.yaml"))
    ours = Harbor(task_dir=str(TASK)).evaluate(Case(task=task, runtime=runtime, logs=tmp_path / "logs", **values))
    assert theirs["rewards"] == ours.evidence["rewards"] == {"reward": reward}
    assert theirs["name"] == "example/count-words"
    assert "".join(theirs["instruction"].split()) == "".join(task.instruction.split())
