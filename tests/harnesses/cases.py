"""What is run of each harness: one entry here per preset, and nothing else to do for a new one.

A case says what the scripted model answers. On the first turn it calls the harness's own tool so that a file
hello.txt with the word hello in it is made in the working folder; on the last it says that it is done, in
whatever way the harness wants to be told. `{workdir}` in an argument is the working folder's path inside.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = {"content": "The file is there."}
BASH = "printf hello > hello.txt"


@dataclass(frozen=True)
class Case:
    """One harness, how it is set up, and what its model says."""

    harness: str
    tool: str
    """The tool of the harness that makes the file."""
    arguments: Mapping[str, Any]
    dialect: str = "openai_chat"
    last: Mapping[str, Any] = field(default_factory=lambda: DONE)
    """The answer of the last turn, as a script has it."""
    side: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """A piece of the prompt of a side call, and the answer to it."""
    makes_side_calls: bool = False
    """At least one side call comes with every run, and must be marked."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = True
    in_ci: bool = False
    """Part of plain `pytest`; the others need POLAR_TEST_HARNESSES."""
    not_run: str | None = None
    """Why it cannot be run here."""
    seconds: float = 120.0
    script: Mapping[str, Any] | None = None
    """The whole of what its model says, for a case that is more than one call of one tool."""


CASES = [
    Case(
        "mini_swe_agent",
        "bash",
        {"command": BASH},
        last={
            "content": "Done.",
            "tool_calls": [
                {"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}},
            ],
        },
        streams=False,
        in_ci=True,
    ),
    Case("qwen_code", "run_shell_command", {"command": BASH, "is_background": False}, in_ci=True),
    Case("swe_agent", "bash", {"command": BASH}, streams=False, not_run="what PyPI has is a placeholder"),
    Case("opencode", "bash", {"command": BASH, "description": "Make the file"}, makes_side_calls=True),
    Case("hermes", "terminal", {"command": BASH}),
    Case("openclaw", "exec", {"command": BASH}),
    Case("openhands_sdk", "terminal", {"command": BASH, "summary": "Make the file"}, streams=False),
    Case("pi", "bash", {"command": BASH}),
    Case(
        "claude_code",
        "Bash",
        {"command": BASH, "description": "Make the file"},
        dialect="anthropic_messages",
        in_ci=True,
    ),
    Case("codex", "exec_command", {"cmd": BASH}, dialect="openai_responses", in_ci=True),
    Case(
        "gemini_cli",
        "run_shell_command",
        {"command": BASH, "description": "Make the file"},
        dialect="google_generate",
    ),
]


def chosen() -> list[Case]:
    """Those that POLAR_TEST_HARNESSES names: `all`, a list with commas, or, unset, the members of CI."""
    wanted = os.environ.get("POLAR_TEST_HARNESSES", "")
    if wanted == "all":
        return CASES
    names = {name.strip() for name in wanted.split(",") if name.strip()}
    return [case for case in CASES if (case.harness in names if names else case.in_ci)]
