"""A harness that runs somewhere else: Polar records its calls, and starts nothing.

Sessions of it are opened and closed over the REST API (`polar.recording`), so no stage ever runs it.
"""

from __future__ import annotations

from typing import ClassVar

from polar.errors import HarnessError
from polar.harnesses.base import AgentExit, Harness, Workplace


class ExternalHarness(Harness):
    """Whatever holds the session's key."""

    name = "external"
    STARTED_HERE: ClassVar[bool] = False

    def run(self, place: Workplace) -> AgentExit:
        raise HarnessError("an external harness is started by whoever opened its session", code="not_started_here")
