"""Pytest-style output judges: 1.0 if the tests end exactly as the task expects them to, else 0.0.

Lines count that begin with PASSED, FAILED, ERROR or SKIPPED, as `pytest -rA` prints them; the exit code does not.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pydantic import field_validator

from polar.evaluators.base import Case
from polar.evaluators.commands import output_of, run
from polar.evaluators.config import Text, read_config
from polar.evaluators.patches import PatchConfig, PatchEvaluator
from polar.runtimes.base import Runtime

ENDS = ("PASSED", "FAILED", "ERROR", "SKIPPED")
COLOUR = re.compile(r"\x1b\[[0-9;]*m|\r")
TAIL = 8000
"""Characters of the tests' output kept as evidence."""


class TestOnOutputConfig(PatchConfig):
    """The tests, and how they should end."""

    __test__: ClassVar[bool] = False

    test_command: Text
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

    def report(self, case: Case, runtime: Runtime) -> dict[str, Any]:
        what, config = "test command", self.config
        result = run(case, runtime, config.test_command, what=what, seconds=config.test_timeout, cwd=config.repo_dir)
        output = b"".join(output_of(case, what, result)).decode(errors="replace")
        parsed = parse_ends(output)
        expected = {short_name(test): str(end) for test, end in config.expected_output_json.items()}
        return {
            "resolved": bool(parsed) and parsed == expected,
            "exit_code": result.exit_code,
            "parsed_tests": parsed,
            "expected_tests": expected,
            "output": output[-TAIL:],
        }


def parse_ends(output: str) -> dict[str, str]:
    """Short test name to how it ended; where a test is named twice, the later line counts."""
    ends = {}
    for raw in output.splitlines():
        words = COLOUR.sub("", raw).split(maxsplit=1)
        if len(words) == 2 and words[0].startswith(ENDS) and (name := short_name(words[1].strip())):
            ends[name] = words[0]
    return ends


def short_name(test: str) -> str:
    """`Class.method` or `function` of a pytest node id, without the reason that may follow it."""
    parts = test.split(" - ")[0].split("::")
    return ".".join(parts[-2:]) if len(parts) >= 3 else parts[-1]
