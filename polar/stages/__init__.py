"""The four stages: what is done to a session that a worker has claimed.

Each stage is a function `run(job: Job) -> Outcome`. It reads the session, does its work within the budget,
and returns the columns to store; it never moves the session: claim, lease, budget, retries and the move
itself surround it in `workers/job.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from polar.lifecycle import Stage
from polar.stages.base import Job, Outcome
from polar.stages.evaluate import evaluate
from polar.stages.execute import execute
from polar.stages.prewarm import prewarm
from polar.stages.reconstruct import reconstruct

STAGE_RUNS: dict[Stage, Callable[[Job], Outcome]] = {
    Stage.PREWARM: prewarm,
    Stage.EXECUTE: execute,
    Stage.RECONSTRUCT: reconstruct,
    Stage.EVALUATE: evaluate,
}

__all__ = ["STAGE_RUNS", "Job", "Outcome"]
