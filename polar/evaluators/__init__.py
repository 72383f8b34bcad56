"""The evaluators by name, and the one way to make one. What an evaluator does is in base.py."""

from __future__ import annotations

from polar import registry
from polar.errors import SpecError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.spec import EvaluatorSpec

EVALUATORS = {
    "answer_match": "polar.evaluators.answer_match:AnswerMatch",
    "command": "polar.evaluators.command:Command",
    "harbor": "polar.evaluators.harbor:Harbor",
    "harbor_rubric": "polar.evaluators.harbor_rubric:HarborRubric",
    "session_completed": "polar.evaluators.session_completed:SessionCompleted",
    "swebench_harness": "polar.evaluators.swebench_harness:SwebenchHarness",
    "test_on_output": "polar.evaluators.test_on_output:TestOnOutput",
}


def create(spec: EvaluatorSpec) -> Evaluator:
    """The evaluator that `spec` names, made with its config.

    Raises SpecError at evaluator.strategy, or at evaluator.config.<key>."""
    member = registry.load("evaluator.strategy", EVALUATORS, spec.strategy, Evaluator)  # type: ignore[type-abstract]
    try:
        made = member(**spec.config)
    except (TypeError, ValueError) as error:
        # A user's own class may simply name its keywords, or refuse a value in the usual way.
        raise SpecError.at("evaluator.config", str(error)) from error
    made.check(spec)
    return made


__all__ = ["EVALUATORS", "Case", "Evaluator", "Verdict", "create"]
