"""Harbor's verifier: the tests of a task in Harbor's layout run in the sandbox and write a reward.

    task.toml  instruction.md  environment/  tests/test.sh   →   /tests, /logs/verifier/reward.json or reward.txt

As there, the tests are copied in only now, over nothing that the agent may have left in their place, and rewards that
already lie there are removed first. With `refresh_runtime` they run where the agent never was, and only the task's
artifacts travel, as with Harbor's separate verifier. Building `environment/` is the runtime's affair; tasks of several
steps, of Windows, and of several services are refused.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from polar.errors import EvaluatorError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.evaluators.commands import CANNOT_RUN, output_of, run, runtime_of
from polar.evaluators.config import Seconds, Text, read_config
from polar.evaluators.evidence import clipped
from polar.runtimes.base import Runtime
from polar.spec import Spec

DEFAULT_TIMEOUT = 120.0
REWARD_BYTES = 1_000_000
OUTPUT_KEPT = 32_000
"""Characters of the tests' output kept as evidence."""
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


class HarborConfig(Spec):
    """Where the tests are, where they go, and what of their reward counts."""

    task_dir: Text | None = None
    """Folder of the task on the node: its tests, and of its task.toml the verifier's time, variables and artifacts."""
    tests_dir: Text | None = None
    """Instead: the folder of the tests alone."""
    verifier_timeout: Seconds | None = None
    """None: what task.toml says, else 120."""
    tests_target: Text = "/tests"
    """Where the tests go in the runtime; what lies there is removed."""
    verifier_dir: Text = "/logs/verifier"
    """Where they leave the reward; emptied first."""
    test_command: Text | None = None
    """None: test.sh of tests_target."""
    carry: tuple[Text, ...] | None = None
    """With refresh_runtime, paths that travel; None: the artifacts of task.toml, and /logs/artifacts."""
    reward_key: Text | None = None
    """Of a reward.json with several numbers, the one that counts; None: their mean."""
    clamp: bool = True
    """A reward outside 0 to 1 counts as the nearer of them."""
    require_exit_zero: bool = False
    """A reward counts only if the tests' command exits with 0."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.task_dir is None) == (self.tests_dir is None):
            raise ValueError("task_dir: give exactly one of task_dir and tests_dir")
        return self


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """What of a task in Harbor's layout bears on its verdict."""

    tests: Path
    timeout: float = DEFAULT_TIMEOUT
    env: dict[str, str] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()


class Harbor(Evaluator):
    """The reward that the task's own tests write."""

    name: ClassVar[str] = "harbor"
    NEEDS_RUNTIME: ClassVar[bool] = True
    config: HarborConfig

    def __init__(self, **config: Any) -> None:
        self.config = read_config(HarborConfig, config)

    def evaluate(self, case: Case) -> Verdict:
        runtime, folder = runtime_of(case, self.name), self._folder(case)
        evidence: dict[str, Any] = {}
        if case.agent_runtime is not None:
            evidence["carried"] = self._carry(case, case.agent_runtime, runtime, folder)
        evidence |= self._run_tests(case, runtime, folder)
        try:
            rewards = self._rewards(case, runtime, evidence["exit_code"])
        except EvaluatorError as error:
            error.detail = evidence
            raise
        reward = self._counted(rewards)
        evidence |= {"rewards": rewards, "clamped": self.config.clamp and not 0 <= reward <= 1}
        return Verdict(min(max(reward, 0.0), 1.0) if self.config.clamp else reward, evidence=evidence)

    def _folder(self, case: Case) -> TaskFolder:
        root = Path(self.config.task_dir or self.config.tests_dir or "").expanduser()
        case.check_source(root)
        found = TaskFolder(root) if self.config.task_dir is None else read_task(root)
        if self.config.test_command is None and not (found.tests / "test.sh").is_file():
            raise EvaluatorError(f"{found.tests} on this node has no test.sh", code="no_tests")
        return found

    def _carry(self, case: Case, agent: Runtime, fresh: Runtime, folder: TaskFolder) -> list[str]:
        """Bring what the agent made into the fresh runtime, and nothing else; what there was."""
        carried = []
        # Beside the verifier's folder is the one whose files travel without being named.
        published = posixpath.join(posixpath.dirname(self.config.verifier_dir), "artifacts")
        paths = self.config.carry if self.config.carry is not None else (published, *folder.artifacts)
        for number, path in enumerate(dict.fromkeys(paths)):
            local = case.logs / f"carried-{number}"
            shutil.rmtree(local, ignore_errors=True)
            try:
                agent.download(path, local)
            except FileNotFoundError:
                continue
            # What the agent deleted is gone there, too.
            self._ready(case, fresh, f"rm -rf -- {shlex.quote(path)}", "carry")
            fresh.upload(local, path)
            carried.append(path)
        return carried

    def _run_tests(self, case: Case, runtime: Runtime, folder: TaskFolder) -> dict[str, Any]:
        config = self.config
        tests, logs = shlex.quote(config.tests_target), shlex.quote(config.verifier_dir)
        self._ready(
            case, runtime, f"rm -rf -- {tests} {logs} && mkdir -p -- {tests} {logs} && chmod 777 {logs}", "room"
        )
        runtime.upload(folder.tests, config.tests_target)
        script = shlex.quote(_runnable(posixpath.join(config.tests_target, "test.sh")))
        command = config.test_command or f"chmod +x {script} && {script}"
        judged = replace(case, env={**resolved(folder.env, case.env), **case.env})
        seconds = config.verifier_timeout or folder.timeout
        result = run(judged, runtime, command, what="verifier", seconds=seconds)
        # What the tests left running must not write a reward after them.
        runtime.kill_all()
        stdout, stderr = (
            clipped(each.decode(errors="replace"), OUTPUT_KEPT) for each in output_of(case, "verifier", result)
        )
        evidence = {"exit_code": result.exit_code, "stdout": stdout, "stderr": stderr}
        if result.exit_code in CANNOT_RUN:
            message = f"the tests could not run, which says nothing of the session: the command {result.summary()}"
            raise EvaluatorError(message, code="command_not_run", detail=evidence)
        return evidence

    def _ready(self, case: Case, runtime: Runtime, command: str, what: str) -> None:
        result = run(case, runtime, command, what=what, seconds=self.config.verifier_timeout or DEFAULT_TIMEOUT)
        if not result.ok:
            raise EvaluatorError(
                f"the sandbox cannot be made ready for the tests: {result.summary()}", code="not_ready"
            )

    def _rewards(self, case: Case, runtime: Runtime, exit_code: int | None) -> dict[str, float]:
        """What the tests wrote: reward.json, or else reward.txt, as Harbor looks for them."""
        if self.config.require_exit_zero and exit_code != 0:
            raise EvaluatorError(
                f"the tests exited with {exit_code}, so their reward does not count", code="tests_broke"
            )
        for name, parse in (("reward.json", _from_json), ("reward.txt", _from_text)):
            local = case.logs / name
            local.unlink(missing_ok=True)
            try:
                runtime.download(posixpath.join(self.config.verifier_dir, name), local)
            except FileNotFoundError:
                continue
            with local.open("rb") as file:
                return parse(name, file.read(REWARD_BYTES).decode(errors="replace"))
        raise EvaluatorError(f"the tests wrote no reward into {self.config.verifier_dir}", code="no_reward_file")

    def _counted(self, rewards: dict[str, float]) -> float:
        key = self.config.reward_key
        if key is None:
            return sum(rewards.values()) / len(rewards)
        if key not in rewards:
            raise EvaluatorError(f"reward.json has no {key!r}, only {', '.join(rewards)}", code="bad_reward")
        return rewards[key]


def read_task(root: Path) -> TaskFolder:
    """The verifier's part of a task in Harbor's layout. Raises EvaluatorError for what Polar cannot do of it."""
    try:
        parsed = tomllib.loads((root / "task.toml").read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EvaluatorError(f"{root} is no Harbor task on this node: {error}", code="no_task") from error
    verifier, environment = _table(parsed, "verifier"), _table(parsed, "environment")
    artifacts = parsed.get("artifacts", [])
    named = [each if isinstance(each, str) else each.get("source") for each in artifacts]
    unable = {
        "has several steps": bool(parsed.get("steps")),
        "is for Windows": environment.get("os", "linux") != "linux",
        "collects from other services": bool(verifier.get("collect"))
        or any(isinstance(each, dict) and each.keys() - {"source", "destination"} for each in artifacts),
    }
    for what, so in unable.items():
        if so:
            raise EvaluatorError(f"the task {root.name} {what}, which Polar does not do", code="unsupported_task")
    return TaskFolder(
        tests=root / "tests",
        timeout=float(verifier.get("timeout_sec", 600.0)),
        env={str(name): str(value) for name, value in verifier.get("env", {}).items()},
        artifacts=tuple(str(each) for each in named),
    )


def resolved(wanted: dict[str, str], known: Any) -> dict[str, str]:
    """Variables of task.toml with `${NAME}` and `${NAME:-default}` taken from what the evaluator was given: a node's
    own environment is not for tasks to read. Raises EvaluatorError."""
    found = {}
    for name, value in wanted.items():
        template = TEMPLATE.fullmatch(value)
        if template is None:
            found[name] = value
        elif template[1] in known:
            found[name] = known[template[1]]
        elif template[2] is not None:
            found[name] = template[2]
        else:
            fix = f"give it in evaluator.env.{template[1]}"
            raise EvaluatorError(f"the tests need the variable {template[1]}: {fix}", code="no_variable")
    return found


def _table(parsed: dict[str, Any], name: str) -> dict[str, Any]:
    found = parsed.get(name, {})
    return found if isinstance(found, dict) else {}


def _runnable(path: str) -> str:
    """A path with a slash: a bare name would be looked for among the programs."""
    return path if "/" in path else f"./{path}"


def _from_text(name: str, text: str) -> dict[str, float]:
    try:
        return {"reward": _finite(float(text))}
    except ValueError:
        raise EvaluatorError(f"{name} is not a finite number: {text.strip()[:200]!r}", code="bad_reward") from None


def _from_json(name: str, text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
        rewards = found if isinstance(found, dict) else {"reward": found}
        if not rewards or not all(isinstance(value, (int, float)) for value in rewards.values()):
            raise ValueError
        return {str(key): _finite(float(value)) for key, value in rewards.items()}
    except (ValueError, OverflowError, RecursionError):
        what = f"neither a finite number nor an object of such: {text.strip()[:200]!r}"
        raise EvaluatorError(f"{name} is {what}", code="bad_reward") from None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError
    return value
