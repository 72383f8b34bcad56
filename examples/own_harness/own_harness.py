"""A harness of one's own: a loop of three questions, run in the runtime, with a class that says how to start it."""

from __future__ import annotations

import shlex
from pathlib import Path

from pydantic import Field

from polar.harnesses.base import AgentExit, Harness, Workplace, settings_of
from polar.spec import AgentSpec, Spec

PROGRAM = Path(__file__).parent / "program.py"


class Settings(Spec):
    """What a task may set in agent.settings."""

    turns: int = Field(default=3, ge=1, le=20)
    """Questions that the program asks."""


class OwnHarness(Harness):
    """Puts its program into the runtime, and starts it with the proxy's address and the session's key."""

    name = "own_harness"

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self.settings = settings_of(spec, Settings)

    def setup(self, place: Workplace) -> None:
        place.runtime.upload(PROGRAM, "program.py")

    def run(self, place: Workplace) -> AgentExit:
        result = place.runtime.exec(
            f"python program.py {self.settings.turns} {shlex.quote(place.instruction)}",
            limits=place.limits,
            env={**place.connection.env(), **place.env},
            log=place.logs / "agent",
        )
        return AgentExit.of(result, "program.py")
