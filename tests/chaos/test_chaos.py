"""Real processes, killed for real: after every fault all promises hold, and the work is done soon after."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.chaos import arrangements, promises, table
from tests.chaos.conftest import ALL
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.scene import TASKS, Scene, until

pytestmark = pytest.mark.e2e
RECOVERY_SECONDS = 30.0
WAIT_SECONDS = 120.0


def fly(scene: Scene, fault: Fault | None) -> tuple[list[str], float]:
    """Submit, strike, and wait for the last end; the tasks, and how long it took."""
    backend = "local" if fault is None else fault.backend
    begin = time.monotonic()
    names = [scene.submit(backend) for _ in range(TASKS // 2)]
    if fault is not None and fault.when == "submit":
        fault.strike(scene, names)
    names += [scene.submit(backend) for _ in range(TASKS - len(names))]
    if fault is not None and fault.when != "submit":
        fault.strike(scene, names)
    until(lambda: not scene.open(names), WAIT_SECONDS, lambda: f"{scene.open(names)} still open\n{scene.log()}")
    return names, time.monotonic() - begin


@pytest.fixture(scope="module")
def usual_seconds(scene: Scene) -> float:
    """How long the same work takes when nothing is killed, with every promise checked for that case, too."""
    # The first round is slow, since every process still loads and connects: it would make the others look quick.
    promises.check(scene, None, fly(scene, None)[0])
    found = []
    for _ in range(2 if ALL else 1):
        names, seconds = fly(scene, None)
        seen = promises.check(scene, None, names)
        assert seen.again == 0
        found.append(seconds)
    table.LINES.append(table.Line("none", "–", seen.outcome(), seen.again, seen.seen, 0.0))
    return statistics.median(found)


@pytest.mark.parametrize("fault", [each for each in FAULTS if ALL or each.quick], ids=lambda fault: fault.id)
def test_all_promises_hold(scene: Scene, usual_seconds: float, fault: Fault) -> None:
    """Every task ends, every session once, nothing seen is lost or doubled, nothing is left behind, soon enough."""
    if arrangements.arrange(scene, fault.arrangement):
        promises.check(scene, None, fly(scene, None)[0])
    names, seconds = fly(scene, fault)
    seen = promises.check(scene, fault, names)
    beyond = seconds - usual_seconds
    table.LINES.append(table.Line(fault.name, fault.when, seen.outcome(), seen.again, seen.seen, beyond))
    assert seen.completed == seen.sessions
    assert seen.again == 0 or not fault.unnoticed
    assert beyond < RECOVERY_SECONDS
