"""OpenHands' agent from its SDK, unmodified from PyPI, over Chat Completions.

The SDK is a library and wants Python 3.12: openhands_runner.py is the program, run by the Python that has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from polar.harnesses import openhands_runner
from polar.harnesses.base import Workplace
from polar.harnesses.program import INSTRUCTION, ProgramSettings, PythonProgram, Release
from polar.messages import ModelRequest
from polar.spec import MCPServerSpec

VERSION = "1.21.0"
RUNNER = ".polar/openhands_runner.py"
PLAN = ".polar/openhands.json"


class Settings(ProgramSettings):
    """`agent.settings` of openhands_sdk."""

    version: Release = VERSION
    """The release of openhands-sdk and openhands-tools to install."""
    python: str = "3.12"
    """Version or path of the Python to install it with, which uv looks for on the node; without `install`, unused."""
    max_turns: int = Field(default=500, ge=1)
    """Steps that the agent takes at most."""
    context_length: int | None = Field(default=None, ge=1024)
    """What it takes the model's context to be; None: what it knows of the model's name."""


class OpenHandsSDK(PythonProgram):
    """Runs the runner by the Python that has `openhands.sdk`."""

    name = "openhands_sdk"
    SUPPORTS_MCP = True
    SUPPORTS_SKILLS = True
    COMMAND = "python"
    SETTINGS = Settings
    SKILLS = ".openhands/skills"
    LOGS = {"openhands-conversations": ".openhands/conversations"}
    BY_STDIN = True
    settings: Settings

    def packages(self) -> Sequence[str]:
        return [f"openhands-sdk=={self.settings.version}", f"openhands-tools=={self.settings.version}"]

    def python(self) -> str | None:
        return self.settings.python

    def probe(self) -> str:
        return f"{self.COMMAND} -c 'import openhands.sdk, openhands.tools'"

    def files(self, place: Workplace) -> Mapping[str, str]:
        length = self.settings.context_length
        plan = {
            "llm": {} if length is None else {"max_input_tokens": length},
            "skills": f"{place.runtime.home}/{self.SKILLS}",
            "persistence_dir": f"{place.runtime.home}/.openhands/conversations",
            "max_turns": self.settings.max_turns,
            "mcp_servers": {server.name: _mcp(server) for server in self.spec.mcp_servers},
        }
        return {PLAN: json.dumps(plan, indent=2), RUNNER: Path(openhands_runner.__file__).read_text()}

    def arguments(self, place: Workplace) -> Sequence[str]:
        return [f"{place.runtime.home}/{path}" for path in (RUNNER, PLAN, INSTRUCTION)]

    def variables(self, place: Workplace) -> Mapping[str, str]:
        return {
            "LLM_MODEL": f"openai/{place.connection.model}",
            "LLM_BASE_URL": f"{place.connection.base_url}/v1",
            "LLM_API_KEY": place.connection.api_key,
            # Otherwise its client library fetches a price list from the internet at every start.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        }

    @staticmethod
    def auxiliary(request: ModelRequest, headers: Mapping[str, str]) -> str | None:
        # Its agent always has tools: what has none sums up a history that became too long.
        return None if request.tools else "a call without tools: summary"


def _mcp(server: MCPServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args)}
    return {"url": server.url, "transport": server.transport}
