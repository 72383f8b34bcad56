"""What the stage does around an evaluator, whoever wrote it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from polar.errors import EvaluatorError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.models import RolloutSession
from polar.settings import Settings
from polar.spec import EvaluatorSpec
from polar.stages.base import Job
from polar.stages.evaluate import _verdict
from tests.fakes.tasks import task, topology


class Own(Evaluator):
    """A user's own, that does what a test says."""

    name = "own"

    def __init__(self, *, does: str) -> None:
        self.does = does

    def evaluate(self, case: Case) -> Verdict:
        if self.does == "break":
            raise KeyError("reward")
        if self.does == "fail":
            raise EvaluatorError("there is none", code="none", detail={"output": "a\0" * 1_000_000})
        if self.does == "return a number":
            return 1.0  # type: ignore[return-value]
        return Verdict(1.0, evidence={"output": "a\0" * 1_000_000, "object": self})


def verdict(tmp_path: Path, does: str) -> Verdict:
    node = topology().gateway.nodes[0]
    session = RolloutSession(id="ses-1", attempt=1, runtimes={}, agent_exit={})
    settings = Settings(home=str(tmp_path))
    job = Job(session, task(), create_engine("sqlite://"), settings, node, node.lanes[0], threading.Event())
    spec = EvaluatorSpec(strategy=f"{__name__}:Own", config={"does": does})
    return _verdict(job, spec, [])


def texts(evidence: dict[str, Any]) -> str:
    return str(evidence["output"])


def test_evidence_is_bounded_whoever_gave_it(tmp_path: Path) -> None:
    """Of a verdict, and fit for the database."""
    kept = verdict(tmp_path, "judge").evidence
    assert len(texts(kept)) < 70_000 and "\0" not in texts(kept)
    assert "Own object" in kept["object"]


def test_the_evidence_of_an_error_is_bounded_too(tmp_path: Path) -> None:
    """It is stored with the session's error."""
    with pytest.raises(EvaluatorError) as caught:
        verdict(tmp_path, "fail")
    assert caught.value.code == "none"
    assert len(texts(caught.value.detail)) < 70_000 and "\0" not in texts(caught.value.detail)


@pytest.mark.parametrize("does", ["break", "return a number"])
def test_an_evaluator_that_breaks_is_to_blame(tmp_path: Path, does: str) -> None:
    """Whatever it raises or returns: not the node, and not a reward."""
    with pytest.raises(EvaluatorError) as caught:
        verdict(tmp_path, does)
    assert (caught.value.blame, caught.value.code) == ("evaluator", "evaluator_broke")
