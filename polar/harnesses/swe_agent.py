"""SWE-agent, over Chat Completions, in runtimes that bring it: what PyPI has under its name is a placeholder.

It works on a copy of the repository in the working folder, which must be a clean git checkout; the patch that it
submits is applied to the working folder afterwards. A run without a patch that applies is a failed one.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from polar.harnesses.base import Workplace
from polar.harnesses.program import INSTRUCTION, Program, ProgramSettings

OUTPUT = ".polar/swe-agent"
APPLY = """
polar_exit=$?
[ $polar_exit -eq 0 ] || exit $polar_exit
polar_patch=$(find {output} -name '*.patch' -size +0 | head -n 1)
[ -n "$polar_patch" ] || {{ echo 'SWE-agent submitted no patch' >&2; exit 1; }}
git apply "$polar_patch"
"""


class Settings(ProgramSettings):
    """`agent.settings` of swe_agent."""

    install: Literal[False] = False
    """It cannot be installed from PyPI: `sweagent` must be on PATH inside the runtime."""
    version: Literal["any"] = "any"
    """The runtime has the one it has."""
    max_turns: int | None = Field(default=None, ge=1)
    """Model calls it makes at most; None: as many as it likes, within the session's budget."""


class SweAgent(Program):
    """Runs `sweagent run`, then applies its patch."""

    name = "swe_agent"
    COMMAND = "sweagent"
    SETTINGS = Settings
    LOGS = {"swe-agent": OUTPUT}
    BY_STDIN = True  # read from its file: see problem_statement.path
    settings: Settings

    def arguments(self, place: Workplace) -> Sequence[str]:
        home, connection = place.runtime.home, place.connection
        options = {
            "agent.model.name": f"openai/{connection.model}",
            "agent.model.api_base": f"{connection.base_url}/v1",
            "agent.model.per_instance_cost_limit": "0",
            "agent.model.total_cost_limit": "0",
            "agent.model.per_instance_call_limit": str(self.settings.max_turns or 0),
            "env.deployment.type": "local",
            "env.repo.path": place.runtime.workdir,
            "problem_statement.path": f"{home}/{INSTRUCTION}",
            "output_dir": f"{home}/{OUTPUT}",
        }
        return ["run", *(f"--{name}={value}" for name, value in options.items())]

    def command(self, place: Workplace) -> str:
        return super().command(place) + APPLY.format(output=shlex.quote(f"{place.runtime.home}/{OUTPUT}"))
