"""The last answer against the expected ones: each way to find it and each way to compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import SpecError
from polar.evaluators.answer_match import AnswerMatch
from polar.evaluators.base import Case

MakeCase = Callable[..., Case]


def said(make: MakeCase, text: str, **changes: Any) -> Case:
    trace = {"prompt_messages": [], "response_messages": [{"role": "assistant", "content": text}]}
    return make(**{"traces": [trace], "runtime": None, **changes})


@pytest.mark.parametrize(
    ("text", "config", "reward"),
    [
        ("  Paris. ", {"answers": "paris"}, 1.0),
        ("Paris, France", {"answers": "paris"}, 0.0),
        ("Paris, France", {"answers": ["london", "paris"], "compare": "contains"}, 1.0),
        ("Paris.", {"answers": "paris", "compare": "exact"}, 0.0),
        ("thinking\nit is\n  42 \n", {"answers": 42, "extract": "last_line"}, 1.0),
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}", {"answers": "\\frac{1}{2}", "extract": "boxed"}, 1.0),
        ("\\boxed{1", {"answers": "1", "extract": "boxed"}, 0.0),
        ("<answer>a</answer> no, <answer> b </answer>", {"answers": "b", "extract": "tag"}, 1.0),
        ("<answer>b", {"answers": "b", "extract": "tag"}, 0.0),
        ("about 1,234.50 or so", {"answers": "1234.5", "compare": "number"}, 1.0),
        ("3 apples, then 4", {"answers": "4", "compare": "number"}, 1.0),
        ("3.2", {"answers": "3", "compare": "number", "tolerance": 0.1}, 1.0),
        ("3.4", {"answers": "3", "compare": "number", "tolerance": 0.1}, 0.0),
        ("none", {"answers": "3", "compare": "number"}, 0.0),
        ("1e999", {"answers": "3", "compare": "number"}, 0.0),
        ("\uff14\uff12", {"answers": "42"}, 1.0),
        ("", {"answers": "a", "compare": "contains"}, 0.0),
    ],
)
def test_answers(case: MakeCase, text: str, config: dict[str, Any], reward: float) -> None:
    """What is compared is what the task says, and nothing around it."""
    assert AnswerMatch(**config).evaluate(said(case, text)).outcome_reward == reward


def test_a_file_of_the_agents(case: MakeCase) -> None:
    """Instead of the last message; without the file there is no answer."""
    judged = case()
    assert judged.runtime is not None
    evaluator = AnswerMatch(answers="7", answer_file="answer.txt")
    assert evaluator.evaluate(judged).outcome_reward == 0.0
    (Path(judged.runtime.workdir) / "answer.txt").write_text("7\n")
    assert evaluator.evaluate(judged).outcome_reward == 1.0


def test_a_session_without_words_has_no_answer(case: MakeCase) -> None:
    """No trace, or none with text: 0.0, and the evidence says that there was none."""
    verdict = AnswerMatch(answers="a").evaluate(case(runtime=None, traces=[]))
    assert (verdict.outcome_reward, verdict.evidence["answer"]) == (0.0, None)


@pytest.mark.parametrize(
    ("config", "field"), [({}, "answers"), ({"answers": []}, "answers"), ({"answers": {}}, "answers")]
)
def test_settings_that_cannot_be(config: dict[str, Any], field: str) -> None:
    """A wrong setting is refused when the evaluator is made, at its own path."""
    with pytest.raises(SpecError) as caught:
        AnswerMatch(**config)
    assert caught.value.errors[0][0] == f"evaluator.config.{field}"
