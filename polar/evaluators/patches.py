"""What the patch evaluators share: the agent's work as a diff, carried into the runtime that is judged in.

With `refresh_runtime` only the diff travels: the agent's processes, its `.git`, its home and the programs that it
installed or replaced stay behind, and files that the task protects are put back after the diff is applied. The rules
are the original's: an empty diff and a diff that cannot be applied get 0.0. How git is read is worktree.py's affair,
what the patched repository is worth each member's.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import uuid
from abc import abstractmethod
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.evaluators.commands import run, runtime_of
from polar.evaluators.config import Seconds, Text
from polar.evaluators.evidence import clipped
from polar.evaluators.worktree import NOT_READABLE, WorkTree
from polar.runtimes.base import Runtime
from polar.spec import EvaluatorSpec, Spec

EXCLUDED = tuple(
    f"{prefix}{pattern}"
    for pattern in ("__pycache__/**", "*.pyc", "*.pyo", ".pytest_cache/**")
    for prefix in ("", "**/")
)
RUNNER_FILES = tuple(
    f"{prefix}{name}"
    for name in ("conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py", "*.pth")
    for prefix in ("", "**/")
)
"""Files that Python or pytest reads by itself as it starts: whoever writes them decides how tests end."""
APPLY_TAIL = 8000
"""Characters kept of what applying the patch printed."""
NAMES_KEPT = 100
"""Names of restored files kept as evidence."""
SECTION = re.compile(rb"^(?=diff --git )", re.MULTILINE)
SECTION_PATH = re.compile(rb'diff --git .* "?b/(.+?)"?\s*$')


class PatchConfig(Spec):
    """Where the repository is and how its changes are read."""

    repo_dir: Text = "/testbed"
    """Folder of the agent's work; it need not be a git repository, but the program must be there."""
    patch_command: Text | None = None
    """Prints the diff, instead of Polar's own reading; then git is believed as the agent left it."""
    base_commit: Text | None = None
    """Where the work began, if tests run in the agent's own runtime; None: HEAD, which the agent's commits move. A
    fresh runtime is its own base."""
    include_ignored: bool = False
    """Files that .gitignore names are part of the work."""
    apply_timeout: Seconds = 60.0
    """For each step of reading and applying the patch."""
    test_timeout: Seconds = 1200.0
    """Tests that take longer leave no verdict."""
    exclude_patterns: tuple[str, ...] = ()
    """Globs of paths whose sections are dropped, besides Python's and pytest's caches."""
    protect: tuple[str, ...] = ()
    """Globs of paths that stay the task's own: what the patch does to them is undone before tests run."""
    protect_runner: bool = True
    """The same for conftest.py, pytest.ini, sitecustomize.py, usercustomize.py and *.pth, in a fresh runtime."""
    max_patch_bytes: Annotated[int, Field(gt=0)] = 32 * 1024 * 1024
    """A larger patch gets 0.0."""


class PatchEvaluator(Evaluator):
    """Reads the patch, applies it where a fresh runtime is given, and asks the member for the verdict."""

    NEEDS_RUNTIME: ClassVar[bool] = True
    config: PatchConfig

    def check(self, spec: EvaluatorSpec) -> None:
        if self.config.protect and not spec.refresh_runtime:
            reason = "must be true with protect: files can be put back only where the agent never was"
            raise SpecError.at("evaluator.refresh_runtime", reason)

    def evaluate(self, case: Case) -> Verdict:
        runtime = runtime_of(case, self.name)
        if case.agent_runtime is None and case.task.evaluator is not None and case.task.evaluator.refresh_runtime:
            # In a fresh runtime alone every patch would be empty, and every reward a made-up zero.
            raise EvaluatorError(
                f"{self.name} reads the patch where the agent worked, but that runtime is gone",
                code="no_agent_runtime",
            )
        case.logs.mkdir(parents=True, exist_ok=True)
        fresh = self._tree(case, runtime) if case.agent_runtime is not None else None
        base = fresh.tree() if fresh is not None else None
        source = self._extract(case, fresh, base)
        report = {"empty_generation": False, "failed_apply_patch": False, "patch_too_large": False, "resolved": False}
        evidence: dict[str, Any] = {"patch": "", "patch_bytes": source.stat().st_size, "report": report}
        if evidence["patch_bytes"] > self.config.max_patch_bytes:
            report["patch_too_large"] = True
            return Verdict(0.0, evidence=evidence)
        patch = without_excluded(source.read_bytes(), self.config.exclude_patterns)
        source.write_bytes(patch)
        evidence["patch"] = clipped(patch.decode(errors="replace"))
        evidence |= {"patch_bytes": len(patch), "patch_sha256": hashlib.sha256(patch).hexdigest()}
        if not patch.strip():
            report["empty_generation"] = True
            return Verdict(0.0, evidence=evidence)
        if fresh is not None and base is not None and not self._carry(case, fresh, base, source, evidence):
            report["failed_apply_patch"] = True
            return Verdict(0.0, evidence=evidence)
        evidence["report"] |= self.report(case, runtime, patch)
        return Verdict(1.0 if evidence["report"]["resolved"] else 0.0, evidence=evidence)

    @abstractmethod
    def report(self, case: Case, runtime: Runtime, patch: bytes) -> dict[str, Any]:
        """What the tests say of the patched repository; `resolved` decides. Raises EvaluatorError."""

    def _tree(self, case: Case, runtime: Runtime) -> WorkTree:
        config = self.config
        # The name is not to be guessed: what lies there already would be the agent's.
        store = f"{runtime.home.rstrip('/')}/.polar-{uuid.uuid4().hex}"
        return WorkTree(case, runtime, config.repo_dir, store, config.apply_timeout, config.include_ignored)

    def _extract(self, case: Case, fresh: WorkTree | None, base: str | None) -> Path:
        """The agent's patch as a file on the node."""
        agent = case.agent_runtime or runtime_of(case, self.name)
        worked, target = self._tree(case, agent), case.logs / "patch.diff"
        if self.config.patch_command is not None:
            return self._asked(case, agent, worked.store, target)
        found = worked.diff(base, target, commit=self.config.base_commit or "HEAD")
        if found.exit_code == NOT_READABLE and fresh is not None and base is not None:
            pack = case.logs / "base.pack"
            fresh.pack(base, pack)
            found = worked.diff(base, target, pack=pack)
            pack.unlink()
        if not found.ok:
            if found.exit_code == NOT_READABLE:
                where = f"no {self.config.base_commit or 'HEAD'} to compare with is left in {self.config.repo_dir}"
                raise EvaluatorError(f"{where}; with refresh_runtime there is one", code="no_base_tree")
            raise EvaluatorError(f"the patch cannot be read: git {found.summary()}", code="no_patch")
        worked.remove()
        return target

    def _asked(self, case: Case, agent: Runtime, store: str, target: Path) -> Path:
        """What the task's own command prints: into a file, because an output is cut where it grows too long."""
        inside = f"{store}/asked"
        command = f"mkdir -p {shlex.quote(store)} && (\n{self.config.patch_command}\n) > {shlex.quote(inside)}"
        found = run(case, agent, command, what="patch command", seconds=self.config.apply_timeout)
        if not found.ok:
            raise EvaluatorError(f"the patch command {found.summary()}", code="no_patch")
        target.unlink(missing_ok=True)
        agent.download(inside, target)
        run(case, agent, f"rm -rf {shlex.quote(store)}", what="clean up", seconds=self.config.apply_timeout)
        return target

    def _carry(self, case: Case, fresh: WorkTree, base: str, patch: Path, evidence: dict[str, Any]) -> bool:
        """Apply the patch and put back what is protected; False if it cannot be applied."""
        found = fresh.apply(patch)
        evidence["apply_patch_output"] = (found.stdout + found.stderr)[-APPLY_TAIL:]
        if not found.ok:
            return False
        globs = (*self.config.protect, *(RUNNER_FILES if self.config.protect_runner else ()))
        changed = fresh.changed(base, case.logs / "changed") if globs else {}
        paths = {path: there for path, there in changed.items() if any(fnmatch(path, glob) for glob in globs)}
        if paths:
            fresh.restore(base, paths, case.logs / "restore")
        evidence["restored"] = sorted(paths)[:NAMES_KEPT]
        fresh.remove()
        return True


def without_excluded(patch: bytes, patterns: tuple[str, ...]) -> bytes:
    """The patch less the sections of files that match; what stands before the first section is kept."""
    before, *sections = SECTION.split(patch)
    kept = [section for section in sections if not _excluded(section, (*EXCLUDED, *patterns))]
    # A patch that begins with a section has nothing before it: split gives an empty first part.
    return b"".join([before, *kept])


def _excluded(section: bytes, patterns: tuple[str, ...]) -> bool:
    header = section.split(b"\n", 1)[0]
    named = SECTION_PATH.match(header)
    path = (named.group(1) if named else header.split()[-1]).decode(errors="replace")
    return any(fnmatch(path, pattern) for pattern in patterns)
