"""Pytest-style output judges: 1.0 if the tests end exactly as the task expects them to, else 0.0.

Lines count that begin with PASSED, FAILED, ERROR or SKIPPED, as `pytest -rA` prints them; the exit code does not. So
tests that never ran are tests that did not pass, however the command ended. Lines are printed by the process in which
the patched code runs: one that contradicts another of the same test is seen, one that lies alone is not.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import field_validator

from polar.evaluators.base import Case
from polar.evaluators.commands import output_of, run
from polar.evaluators.config import Text, read_config
from polar.evaluators.ends import contradictions, parse_ends, short_name
from polar.evaluators.evidence import clipped
from polar.evaluators.patches import PatchConfig, PatchEvaluator
from polar.runtimes.base import Runtime

OUTPUT_KEPT = 32_000
"""Characters of the tests' output kept as evidence."""


class TestOnOutputConfig(PatchConfig):
    """The tests, and how they should end."""

    __test__: ClassVar[bool] = False

    test_command: Text
    """Runs in repo_dir, and prints a line for each test."""
    expected_output_json: dict[str, Any]
    """Node id to PASSED, FAILED, ERROR or SKIPPED; an object, or its JSON text."""

    @field_validator("expected_output_json", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"is not JSON: {error}") from error
        if not isinstance(value, dict) or not value:
            raise ValueError("must be a JSON object that names at least one test")
        return value


class TestOnOutput(PatchEvaluator):
    """Runs the task's tests on the patched repository and compares every end."""

    __test__: ClassVar[bool] = False
    """Keeps pytest, which goes by the name, from taking this for a test."""
    name: ClassVar[str] = "test_on_output"

    def __init__(self, **config: Any) -> None:
        self.config: TestOnOutputConfig = read_config(TestOnOutputConfig, config)

    def report(self, case: Case, runtime: Runtime, patch: bytes) -> dict[str, Any]:
        what, config = "test command", self.config
        result = run(case, runtime, config.test_command, what=what, seconds=config.test_timeout, cwd=config.repo_dir)
        output = b"".join(output_of(case, what, result)).decode(errors="replace")
        parsed, contradicted = parse_ends(output), contradictions(output)
        expected = {short_name(test): str(end) for test, end in config.expected_output_json.items()}
        return {
            "resolved": bool(parsed) and parsed == expected and not contradicted,
            "exit_code": result.exit_code,
            "parsed_tests": parsed,
            "expected_tests": expected,
            "contradicted_tests": contradicted,
            "output": clipped(output, OUTPUT_KEPT),
        }
