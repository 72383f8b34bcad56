"""The base of presets whose program comes from a package registry: install, configure, run, keep the logs.

A preset derives from `NpmProgram` or `PythonProgram` and says what is its own; the least is COMMAND, SETTINGS with
a default version, `packages` and `arguments`:

    class Thing(NpmProgram):
        name = "thing"
        COMMAND = "thing"                             the program's name, on PATH or in the package
        SETTINGS = ThingSettings                      a ProgramSettings
        LOGS = {"thing-sessions": ".thing/sessions"}  kept in the session's logs under this name; path below HOME
        SKILLS = ".thing/skills"                      where agent.skills_path is copied to, with SUPPORTS_SKILLS
        BY_STDIN = True                               it reads the instruction from its standard input: any length
        settings: ThingSettings

        def packages(self): return [f"@maker/thing@{self.settings.version}"]
        def files(self, place): return {".thing/config.json": json.dumps(…)}    below HOME inside the runtime
        def arguments(self, place): return ["-p", place.instruction]
        def variables(self, place): return {"THING_OFFLINE": "1"}
        def ended(self, place, result): …        only for a program whose exit code does not say that it failed

Variables: Connection.env() first, over it the session's, over these the preset's, and agent.env over all. The
working folder is the runtime's. Installed programs are run by their path, and PATH stays as the task has it. With
settings.install false the program is looked for on PATH inside the runtime, and setup fails if it is not there.
How packages get onto the node is install.py's.
"""

from __future__ import annotations

import shlex
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from polar.errors import HarnessError, RuntimeFault
from polar.harnesses import install
from polar.harnesses.base import AgentExit, Harness, Workplace, settings_of
from polar.runtimes.base import ExecResult
from polar.spec import AgentSpec, Spec

Release = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+!-]*$")]
"""A version as registries have it, and nothing that an installer could take for an option."""

INSTRUCTION = ".polar/instruction.txt"
"""Where the instruction is, below HOME, for programs that read it. As an argument it could not pass 128 kB."""


class ProgramSettings(Spec):
    """What `agent.settings` of every such preset has."""

    install: bool = True
    """False: the program is on PATH inside the runtime."""
    version: Release
    """The release to install."""


class Program(Harness):
    """See the module."""

    COMMAND: ClassVar[str]
    SETTINGS: ClassVar[type[ProgramSettings]]
    LOGS: ClassVar[Mapping[str, str]] = {}
    SKILLS: ClassVar[str | None] = None
    BY_STDIN: ClassVar[bool] = False
    settings: ProgramSettings

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self.settings = settings_of(spec, self.SETTINGS)

    def packages(self) -> Sequence[str]:
        """What to install, pinned; the program's own package first."""
        return ()

    @abstractmethod
    def arguments(self, place: Workplace) -> Sequence[str]:
        """The command line after the program's name."""

    def files(self, place: Workplace) -> Mapping[str, str]:
        """Files that it reads: paths below HOME, and their texts."""
        return {}

    def variables(self, place: Workplace) -> Mapping[str, str]:
        """Environment variables of this program."""
        return {}

    def ended(self, place: Workplace, result: ExecResult) -> AgentExit:
        """How the run went; its logs are there already."""
        return AgentExit.of(result, self.COMMAND)

    def probe(self) -> str:
        """The shell command that succeeds where the program is in the runtime."""
        return f"command -v {self.COMMAND}"

    def obtain(self, place: Workplace) -> None:
        """Have the packages in `folder`."""
        raise HarnessError(f"{self.name} cannot be installed from a registry", code="install_failed")

    def installed(self, place: Workplace) -> install.Installed:
        """How the program is run from `folder`."""
        raise HarnessError(f"{self.name} cannot be installed from a registry", code="install_failed")

    def folder(self, place: Workplace) -> Path:
        """Where on the node it is installed: named by what is in it, so that versions stand side by side."""
        return place.cache / "+".join(_folder_name(package) for package in self.packages())

    def setup(self, place: Workplace) -> None:
        if self.settings.install:
            self.obtain(place)
            self.program(place)
        else:
            self._look_for_it(place)
        self._write(place)
        if self.spec.skills_path and self.SKILLS:
            self._copy_skills(place, self.spec.skills_path, self.SKILLS)

    def run(self, place: Workplace) -> AgentExit:
        result = place.runtime.exec(
            self.command(place), limits=place.limits, env=self.env(place), log=place.logs / "agent"
        )
        self.collect(place)
        return self.ended(place, result)

    def collect(self, place: Workplace) -> None:
        for name, path in self.LOGS.items():
            try:
                place.runtime.download(f"{place.runtime.home}/{path}", place.logs / name)
            except (FileNotFoundError, RuntimeFault):  # it ended before it wrote any, or spoilt its own folder
                continue

    def command(self, place: Workplace) -> str:
        """The command line, for a shell."""
        # Some read their standard input to its end before they begin, and not every runtime gives an empty one.
        stdin = shlex.quote(f"{place.runtime.home}/{INSTRUCTION}") if self.BY_STDIN else "/dev/null"
        return f"{shlex.join([*self.program(place), *self.arguments(place)])} <{stdin}"

    def env(self, place: Workplace) -> dict[str, str]:
        """The variables it is run with."""
        return {**place.connection.env(), **place.env, **self.variables(place), **self.spec.env}

    def program(self, place: Workplace) -> list[str]:
        """The first words of the command line, as paths inside; what they need is shown to the runtime."""
        if not self.settings.install:
            return [self.COMMAND]
        found = self.installed(place)
        try:
            shown = {folder: Path(place.runtime.expose(folder)) for folder in found.folders}
        except RuntimeFault as error:
            said = f"{error.message}; install {self.COMMAND} in the runtime and set agent.settings.install to false"
            raise HarnessError(said, code="not_installed") from error
        return [_inside(word, shown) for word in found.argv]

    def _look_for_it(self, place: Workplace) -> None:
        found = place.runtime.exec(self.probe(), limits=place.limits, env=self.env(place))
        if not found.ok and not (found.timed_out or found.cancelled):
            said = f"{self.COMMAND} is not on PATH inside the runtime, or does not work there: {found.summary()}"
            raise HarnessError(f"{said}; install it there, or set agent.settings.install", code="not_installed")

    def _write(self, place: Workplace) -> None:
        with tempfile.TemporaryDirectory() as made:
            # A folder in it, because copying takes a folder's mode along and this one's is for its owner alone.
            home = Path(made) / "home"
            home.mkdir()
            files = {**self.files(place), **({INSTRUCTION: place.instruction} if self.BY_STDIN else {})}
            for path, text in files.items():
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(text)
            place.runtime.upload(home, place.runtime.home)

    def _copy_skills(self, place: Workplace, source: str, target: str) -> None:
        into = shlex.quote(f"{place.runtime.home}/{target}")
        copied = place.runtime.exec(
            f"mkdir -p {into} && cp -R {shlex.quote(source)}/. {into}", limits=place.limits, env=place.env
        )
        if not copied.ok and not (copied.timed_out or copied.cancelled):
            said = f"agent.skills_path {source} cannot be copied inside the runtime: {copied.summary()}"
            raise HarnessError(said, code="no_skills")


class NpmProgram(Program):
    """One that is installed from npm and run by Polar's own Node.js."""

    def obtain(self, place: Workplace) -> None:
        log = place.logs / "install"
        install.node_program(self.packages(), self.folder(place), limits=place.limits, log=log)

    def installed(self, place: Workplace) -> install.Installed:
        return install.node_command(self.folder(place), self.COMMAND)


class PythonProgram(Program):
    """One that is installed from PyPI into a virtual environment of its own."""

    def python(self) -> str | None:
        """The version of Python that it wants; None: Polar's own will do."""
        return None

    def obtain(self, place: Workplace) -> None:
        log, python = place.logs / "install", self.python()
        install.python_program(self.packages(), self.folder(place), limits=place.limits, log=log, python=python)

    def installed(self, place: Workplace) -> install.Installed:
        return install.python_command(self.folder(place), self.COMMAND)


def _folder_name(package: str) -> str:
    return package.replace("==", "-").replace("@", "-").replace("/", "-").strip("-")


def _inside(word: str, shown: Mapping[Path, Path]) -> str:
    path = Path(word)
    for folder, place in shown.items():
        if path.is_relative_to(folder):
            return str(place / path.relative_to(folder))
    return word
