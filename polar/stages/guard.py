"""What a task may bring in from the node, and what of a session's key may not stay behind when its agent is done.

Where a sandbox ends is the runtime's affair; what the proxy stores, the proxy's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from polar.errors import PrepareError, SessionError
from polar.harnesses.base import AgentExit
from polar.settings import Settings

MASK = "[redacted]"
NEVER = ("/proc", "/sys", "/dev")
"""Of a worker, these hold its environment and its memory."""
READ_AT_ONCE = 64 << 20
"""Bytes of the largest log that is looked through."""


def check_source(source: Path, settings: Settings) -> None:
    """Whether an upload may start there, links followed. Raises PrepareError."""
    place = source.resolve()
    kept = settings.home_path
    if place.is_relative_to(kept) or kept.is_relative_to(place):
        raise PrepareError(f"{source} holds, or is part of, the Polar home", code="source_refused")
    if place == Path("/") or any(place.is_relative_to(each) for each in NEVER):
        raise PrepareError(f"{source} is the node's own", code="source_refused")
    allowed = [Path(each.strip()).resolve() for each in settings.upload_from.split(":") if each.strip()]
    if allowed and not any(place.is_relative_to(each) for each in allowed):
        raise PrepareError(f"{source} is in none of the folders of POLAR_UPLOAD_FROM", code="source_refused")


def exit_without(key: str, agent_exit: AgentExit) -> AgentExit:
    """How the agent went, without the key that its last words may have had."""
    return replace(agent_exit, error=agent_exit.error and agent_exit.error.replace(key, MASK))


def error_without(key: str, error: SessionError) -> None:
    """Take the key out of an error's sentence."""
    error.args = (error.message.replace(key, MASK), *error.args[1:])


def logs_without(key: str, folder: Path) -> None:
    """Take the key out of what the program printed and left; links are not followed."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > READ_AT_ONCE:
            continue
        data = path.read_bytes()
        if key.encode() in data:
            path.write_bytes(data.replace(key.encode(), MASK.encode()))
