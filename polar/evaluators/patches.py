"""What the patch evaluators share: the agent's work as a diff, carried into the runtime that is judged in.

The rules are the original's: sections of files that tests leave behind are dropped, an empty diff and a diff
that cannot be applied get 0.0. What the patched repository is worth is each member's affair.
"""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from polar.errors import EvaluatorError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.evaluators.commands import CANNOT_RUN, log_of, output_of, run, runtime_of
from polar.evaluators.config import Seconds, Text
from polar.runtimes.base import OUTPUT_LIMIT, Runtime
from polar.spec import Spec

EXCLUDED = tuple(
    f"{prefix}{pattern}"
    for pattern in ("__pycache__/**", "*.pyc", "*.pyo", ".pytest_cache/**")
    for prefix in ("", "**/")
)
APPLY_TAIL = 8000
"""Characters kept of what applying the patch printed."""
SECTION = re.compile(rb"^(?=diff --git )", re.MULTILINE)
SECTION_PATH = re.compile(rb'diff --git .* "?b/(.+?)"?\s*$')


class PatchConfig(Spec):
    """Where the repository is and how its changes are read."""

    repo_dir: Text = "/testbed"
    patch_command: Text | None = None
    """Prints the diff; None: `git diff` of repo_dir, which leaves out files that were never added."""
    apply_timeout: Seconds = 60.0
    """For reading the patch, and for applying it."""
    test_timeout: Seconds = 1200.0
    exclude_patterns: tuple[str, ...] = ()
    """Globs of paths whose sections are dropped, besides Python's and pytest's caches."""

    @property
    def extraction(self) -> str:
        default = f"cd {shlex.quote(self.repo_dir)} && git diff --binary --submodule=diff"
        return self.patch_command or default


class PatchEvaluator(Evaluator):
    """Reads the patch, applies it where a fresh runtime is given, and asks the member for the verdict."""

    NEEDS_RUNTIME: ClassVar[bool] = True
    config: PatchConfig

    def evaluate(self, case: Case) -> Verdict:
        runtime = runtime_of(case, self.name)
        if case.agent_runtime is None and case.task.evaluator is not None and case.task.evaluator.refresh_runtime:
            # In a fresh runtime alone every patch would be empty, and every reward a made-up zero.
            raise EvaluatorError(
                f"{self.name} reads the patch where the agent worked, but that runtime is gone",
                code="no_agent_runtime",
            )
        patch = without_excluded(self._extract(case, case.agent_runtime or runtime), self.config.exclude_patterns)
        evidence: dict[str, Any] = {"patch": patch.decode(errors="replace"), "report": _report()}
        if not patch.strip():
            evidence["report"]["empty_generation"] = True
            return Verdict(0.0, evidence=evidence)
        if case.agent_runtime is not None:
            applied, said = self._apply(case, runtime, patch)
            evidence["apply_patch_output"] = said[-APPLY_TAIL:]
            if not applied:
                evidence["report"]["failed_apply_patch"] = True
                return Verdict(0.0, evidence=evidence)
        evidence["report"] |= self.report(case, runtime)
        return Verdict(1.0 if evidence["report"]["resolved"] else 0.0, evidence=evidence)

    @abstractmethod
    def report(self, case: Case, runtime: Runtime) -> dict[str, Any]:
        """What the tests say of the patched repository; `resolved` decides. Raises EvaluatorError."""

    def _extract(self, case: Case, runtime: Runtime) -> bytes:
        what = "patch command"
        result = run(case, runtime, self.config.extraction, what=what, seconds=self.config.apply_timeout)
        if not result.ok:
            raise EvaluatorError(f"the patch command {result.summary()}", code="no_patch")
        patch = output_of(case, what, result)[0]
        logged = Path(f"{log_of(case, what)}.stdout").exists()
        if not logged and len(patch) >= OUTPUT_LIMIT:
            raise EvaluatorError("the patch is too large to be read whole", code="patch_too_large")
        return patch

    def _apply(self, case: Case, runtime: Runtime, patch: bytes) -> tuple[bool, str]:
        source = case.logs / "patch.diff"
        source.write_bytes(patch)
        target = f"{runtime.workdir.rstrip('/')}/.polar-patch.diff"
        runtime.upload(source, target)
        inside = shlex.quote(target)
        # The file is taken away again: it may lie in the repository, where tests could trip over it.
        command = (
            f"git apply -v {inside} || "
            f"{{ echo 'git apply failed, trying patch'; patch --batch --fuzz=5 -p1 -i {inside}; }}; "
            f"code=$?; rm -f {inside}; exit $code"
        )
        result = run(case, runtime, command, what="patch", seconds=self.config.apply_timeout, cwd=self.config.repo_dir)
        if result.exit_code in CANNOT_RUN:
            raise EvaluatorError(f"the patch cannot be applied there: it {result.summary()}", code="command_not_run")
        return result.ok, result.stdout + result.stderr


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


def _report() -> dict[str, Any]:
    return {"empty_generation": False, "failed_apply_patch": False, "resolved": False}
