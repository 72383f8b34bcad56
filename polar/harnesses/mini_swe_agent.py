"""mini-swe-agent, unmodified from PyPI, over Chat Completions.

Installed once per node into a virtual environment of its own, unless the runtime brings it. It is run without
a terminal: every command of the model is taken, and no question is asked at the end. It ends with 0 also when
it hit its own limits; how it ended is in its trajectory file, and is noted as `detail.exit_status`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

from pydantic import Field

from polar.errors import HarnessError, RuntimeFault
from polar.harnesses import install
from polar.harnesses.base import AgentExit, Harness, Workplace, settings_of
from polar.spec import AgentSpec, Spec

VERSION = "2.4.6"
LITELLM = "1.81.16"
"""Its client library, which it leaves unpinned: 1.106 fails at the first call with tools, for want of a package
that it does not ask for, and this one starts in half the time."""
TRAJECTORY = "mini-swe-agent.trajectory.json"


class Settings(Spec):
    """`agent.settings` of mini_swe_agent."""

    install: bool = True
    """False: `mini` is on PATH inside the runtime."""
    version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+!]*$")] = VERSION
    """The release to install."""
    litellm_version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+!]*$")] = LITELLM
    """The release of its client library to install with it."""
    step_limit: int | None = Field(default=None, ge=1)
    """Model calls it makes at most; None: as many as it likes, within the session's budget."""
    config: str | tuple[str, ...] = ()
    """More of its `-c` options: paths inside the runtime or `key.path=value`, over its own mini.yaml."""


class MiniSweAgent(Harness):
    """Runs `mini`."""

    name = "mini_swe_agent"

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self.settings = settings_of(spec, Settings)

    def setup(self, place: Workplace) -> None:
        if not self.settings.install:
            found = place.runtime.exec("command -v mini", limits=place.limits, env=place.env)
            if not found.ok and not (found.timed_out or found.cancelled):
                said = "mini is not on PATH inside the runtime; install mini-swe-agent there, or set settings.install"
                raise HarnessError(said, code="not_installed")
            return
        folder = self.folder(place)
        wanted = [f"mini-swe-agent=={self.settings.version}", f"litellm=={self.settings.litellm_version}"]
        install.python_program(wanted, folder, limits=place.limits, log=place.logs / "install")
        try:
            place.runtime.expose(folder)
        except RuntimeFault as error:
            said = f"{error.message}; install mini-swe-agent in the runtime and set settings.install to false"
            raise HarnessError(said, code="not_installed") from error

    def run(self, place: Workplace) -> AgentExit:
        result = place.runtime.exec(
            self.command(place), limits=place.limits, env=self.env(place), log=place.logs / "agent"
        )
        self.collect(place)
        ended = AgentExit.of(result, "mini-swe-agent")
        status = _exit_status(place.logs / TRAJECTORY)
        if status is not None:
            ended.detail["exit_status"] = status
        return ended

    def collect(self, place: Workplace) -> None:
        try:
            place.runtime.download(self._trajectory(place), place.logs / TRAJECTORY)
        except (FileNotFoundError, RuntimeFault):  # it ended before its first step, or spoilt its own file
            return

    def command(self, place: Workplace) -> str:
        """The command line, for a shell."""
        program, builtin = "mini", "mini.yaml"
        if self.settings.install:
            venv = Path(place.runtime.expose(self.folder(place)))
            program = str(venv / "bin" / "mini")
            # By its path: a bare name would first be looked for in the task's own folder.
            found = self.folder(place).glob("lib/python*/site-packages/minisweagent/config/mini.yaml")
            builtin = next((str(venv / path.relative_to(self.folder(place))) for path in found), builtin)
        given = (self.settings.config,) if isinstance(self.settings.config, str) else self.settings.config
        configs = [builtin, *given]
        if self.settings.step_limit is not None:
            configs.append(f"agent.step_limit={self.settings.step_limit}")
        argv = [program, "-m", f"openai/{place.connection.model}", "-t", place.instruction]
        argv += ["-y", "--exit-immediately", "-l", "0", "-o", self._trajectory(place)]
        for config in configs:
            argv += ["-c", config]
        return shlex.join(argv)

    def env(self, place: Workplace) -> dict[str, str]:
        """The variables it is run with; the task's own win."""
        return {
            **place.connection.env(),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{place.runtime.home}/mini-swe-agent",
            # Its ten tries take four minutes, and the proxy has tried again already.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            # Otherwise its client library fetches a price list from the internet at every start.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            **place.env,
        }

    def folder(self, place: Workplace) -> Path:
        """Where on the node it is installed."""
        name = f"mini-swe-agent-{self.settings.version}-litellm-{self.settings.litellm_version}"
        return place.cache.absolute() / name

    @staticmethod
    def _trajectory(place: Workplace) -> str:
        return f"{place.runtime.home}/{TRAJECTORY}"


def _exit_status(trajectory: Path) -> str | None:
    """How the program says it ended, in its own words."""
    try:
        status = json.loads(trajectory.read_text(errors="replace"))["info"]["exit_status"]
    except (OSError, ValueError, KeyError, TypeError):  # absent, cut off in the middle of writing, or another format
        return None
    return str(status)
