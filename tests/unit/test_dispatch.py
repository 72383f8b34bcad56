"""Queues: a lane's name means its four stage queues."""

from __future__ import annotations

import pytest

from polar.dispatch import STAGE_NAMES, expand, lane_of
from polar.lifecycle import STAGES


@pytest.mark.parametrize(
    ("asked", "queues"),
    [
        (["gpu0"], ["gpu0.prewarm", "gpu0.execute", "gpu0.reconstruct", "gpu0.evaluate"]),
        (["gpu0.execute"], ["gpu0.execute"]),
        (["node1.gpu0.evaluate"], ["node1.gpu0.evaluate"]),
        (["gpu0", "gpu0.execute"], ["gpu0.prewarm", "gpu0.execute", "gpu0.reconstruct", "gpu0.evaluate"]),
    ],
)
def test_expand(asked: list[str], queues: list[str]) -> None:
    """Lanes are expanded, stage queues stay, nothing comes twice."""
    assert expand(asked) == queues


def test_lane_of() -> None:
    """A queue and a lane's own name both lead back to the lane."""
    assert [lane_of(name) for name in ("gpu0", "gpu0.execute", "node1.gpu0.prewarm")] == ["gpu0", "gpu0", "node1.gpu0"]


def test_the_stages_are_the_same_everywhere() -> None:
    """Queues are named after the stages of the lifecycle."""
    assert list(STAGES) == list(STAGE_NAMES)
