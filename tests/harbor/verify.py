"""Run by a Python that has the package harbor: its own models load a task, its own verifier judges it.

    python verify.py TASK SANDBOX [solve]     prints {"rewards": …, "name": …, "instruction": …}

The sandbox is bubblewrap with a root of its own, as simple as it can be; all else is the package's code.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from harbor.models.task.config import TaskOS
from harbor.models.task.task import Task
from harbor.models.trial.paths import TrialPaths
from harbor.verifier.verifier import Verifier

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc")


class Sandbox:
    """What the verifier asks of an environment."""

    os = TaskOS.LINUX
    capabilities = SimpleNamespace(mounted=False)

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        for place in (Path(each) for each in SYSTEM):
            if place.is_symlink():
                (root / place.name).symlink_to(place.readlink())

    def is_path_mounted(self, *_: object) -> bool:
        return False

    def run(self, command: str, env: dict[str, str] | None = None) -> SimpleNamespace:
        argv = [
            "bwrap",
            "--bind",
            str(self.root),
            "/",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--unshare-pid",
            "--clearenv",
        ]
        for place in SYSTEM:
            argv += [] if Path(place).is_symlink() or not Path(place).is_dir() else ["--ro-bind", place, place]
        for name, value in {"PATH": "/usr/bin:/bin", "HOME": "/tmp", **(env or {})}.items():
            argv += ["--setenv", name, value]
        done = subprocess.run([*argv, "--", "bash", "-c", command], capture_output=True, text=True, timeout=60)
        return SimpleNamespace(return_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    async def exec(self, command: str, env: dict[str, str] | None = None, user: object = None) -> SimpleNamespace:
        return self.run(command, env)

    async def upload_dir(self, source_dir: object, target_dir: str) -> None:
        target = self.root / target_dir.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", f"{source_dir}/.", str(target)], check=True)

    async def download_dir(self, source_dir: str, target_dir: object) -> None:
        subprocess.run(["cp", "-r", f"{self.root / source_dir.lstrip('/')}/.", str(target_dir)], check=True)


def main() -> None:
    folder, place = Path(sys.argv[1]), Path(sys.argv[2])
    assert Task.is_valid_dir(folder)
    task = Task(folder)
    sandbox, trial = Sandbox(place / "root"), TrialPaths(place / "trial")
    for name in ("tmp", "logs/verifier", "logs/agent", "logs/artifacts", "solution"):
        (sandbox.root / name).mkdir(parents=True)
    trial.mkdir()
    # What the Dockerfile of the task would copy.
    asyncio.run(sandbox.upload_dir(folder / "environment/app", "/app"))
    if "solve" in sys.argv[3:]:
        asyncio.run(sandbox.upload_dir(task.paths.solution_dir, "/solution"))
        assert sandbox.run("bash /solution/solve.sh").return_code == 0
    result = asyncio.run(Verifier(task, trial, sandbox).verify())
    print(json.dumps({"rewards": result.rewards, "name": task.name, "instruction": task.instruction}))


main()
