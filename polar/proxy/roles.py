"""What part a call plays, as far as the call itself tells: the main loop, a sub-agent, or a side call.

A harness's own class knows its side calls best. What only the whole session shows is told when it is reconstructed
(`stages.roles`), since what is a side call beside one loop may be all there is of another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from polar.errors import SpecError
from polar.harnesses import HARNESSES
from polar.harnesses.base import Harness
from polar.log import line
from polar.messages import ModelRequest
from polar.registry import load

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Role:
    """`main`, `subagent` or `auxiliary`, and why."""

    name: str = "main"
    reason: str | None = None


MAIN = Role()


def role_of(request: ModelRequest, headers: Mapping[str, str], harness: str | None) -> Role:
    """The role of a call of a program that `harness` runs."""
    member = _member(harness) if harness else None
    if member is not None:
        if (why := member.auxiliary(request, headers)) is not None:
            return Role("auxiliary", f"{harness}: {why}")
        if (name := member.subagent(request, headers)) is not None:
            return Role("subagent", f"{harness}: {name}")
    return MAIN


@lru_cache(maxsize=64)
def _member(harness: str) -> type[Harness] | None:
    try:
        return load("harness", HARNESSES, harness, Harness)  # type: ignore[type-abstract]
    except SpecError as error:
        # A class of the task's own that is importable where it runs, but not here.
        logger.warning(line("side calls of a harness are not known here", harness=harness, error=error.message))
        return None
