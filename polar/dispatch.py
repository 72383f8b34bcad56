"""What is published, and to which queue: plain values. Who publishes (Celery) stands in `workers/`.

A message wakes, the row decides: messages carry an id and nothing that matters, so that losing one costs
a few seconds and doubling one costs nothing.
"""

from __future__ import annotations

from typing import Protocol

STAGE_NAMES = ("prewarm", "execute", "reconstruct", "evaluate")


def stage_queue(lane: str, stage: str) -> str:
    """The queue of one stage of one lane: `gpu0.execute`."""
    return f"{lane}.{stage}"


def expand(queues: list[str]) -> list[str]:
    """Lane names become their stage queues; names of stage queues stay. `["gpu0"]` serves the lane whole."""
    expanded: list[str] = []
    for name in queues:
        dedicated = name.rpartition(".")[2] in STAGE_NAMES
        expanded += [name] if dedicated else [stage_queue(name, stage) for stage in STAGE_NAMES]
    return list(dict.fromkeys(expanded))


def lane_of(queue: str) -> str:
    """The lane that a queue, or a lane's own name, belongs to."""
    head, _, tail = queue.rpartition(".")
    return head if tail in STAGE_NAMES else queue


class Dispatcher(Protocol):
    """Publishes wake-ups. Always called after the commit that caused them."""

    def wake(self, session_id: str, stage: str, lane: str) -> None:
        """The rest of a session's chain, from `stage` on, on the lane's queues."""

    def look(self, lane: str) -> None:
        """Ask a lane to look whether it has room for queued sessions."""
