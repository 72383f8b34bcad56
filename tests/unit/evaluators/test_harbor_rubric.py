"""A judge behind real HTTP: what it says becomes rewards, and what it fails to say becomes an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from polar.delivery.callbacks import check_url
from polar.embedded import free_port
from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case
from polar.evaluators.harbor_rubric import HarborRubric
from tests.fakes.judge import judge

MakeCase = Callable[..., Case]
CRITERIA = [
    {"name": "clear", "description": "Is the code clear?", "weight": 3},
    {"name": "short", "description": "Is it short?"},
]
TRACES = [
    {"prompt_messages": [{"role": "user", "content": f"part {number}"}], "response_messages": [], "metadata": {}}
    for number in range(2)
]
GOOD = json.dumps(
    {"traces": [{"scores": {"clear": 5, "short": 1}}, {"scores": {"clear": -5, "short": -5}, "reason": "no"}]}
)


@pytest.fixture
def rubric(tmp_path: Path) -> Callable[..., HarborRubric]:
    """The evaluator with tests that give 0.5."""

    def make(url: str, **config: Any) -> HarborRubric:
        tests = tmp_path / "of the task"
        tests.mkdir(exist_ok=True)
        (tests / "test.sh").write_text('#!/bin/sh\ntest -z "$JUDGE_API_KEY" && echo 0.5 > logs/reward.txt\n')
        values = {"tests_dir": str(tests), "tests_target": "tests", "verifier_dir": "logs", "criteria": CRITERIA}
        values |= {"judge_base_url": url, "judge_model": "judge", "judge_format": "none"}
        return HarborRubric(**(values | config))

    return make


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a judge that gives these answers in turn; its URL."""
    with ExitStack() as stack:
        yield lambda *answers: stack.enter_context(judge([{"content": each} for each in answers], tmp_path))


def test_scores_move_the_reward_of_each_trace(
    case: MakeCase, rubric: Callable[..., HarborRubric], answering: Callable[..., str]
) -> None:
    """By weight, for each trace its own; the judge's words are kept, and its key is not given to the tests."""
    judged = case(traces=TRACES, env={"JUDGE_API_KEY": "secret"})
    verdict = rubric(answering(f"Here it is:\n```json\n{GOOD}\n```")).evaluate(judged)
    assert verdict.trace_rewards == pytest.approx([0.5 + 0.2 * 4 / 5, 0.5 - 0.2])
    assert verdict.outcome_reward == pytest.approx(0.48)
    assert verdict.evidence["weighted_scores"] == [4.0, -5.0]
    assert "Here it is" in verdict.evidence["judge"][0]["said"]
    assert verdict.evidence["tests_reward"] == 0.5
    assert "secret" not in json.dumps(verdict.evidence)


@pytest.mark.parametrize(
    "first",
    [
        "I like it.",
        '{"traces": []}',
        '{"traces": [{"scores": {"clear": 6, "short": 0}}, {"scores": {"clear": 0, "short": 0}}]}',
        '{"traces": [{"scores": {"clear": 1}}, {"scores": {"clear": 0, "short": 0}}]}',
        '{"traces": ' + "[" * 5000,
    ],
)
def test_an_answer_that_is_none_is_asked_for_again(
    case: MakeCase, rubric: Callable[..., HarborRubric], answering: Callable[..., str], first: str
) -> None:
    """With what was wrong with it; the second answer counts, and both are kept."""
    verdict = rubric(answering(first, GOOD)).evaluate(case(traces=TRACES))
    assert verdict.trace_rewards is not None and len(verdict.evidence["judge"]) == 2
    assert verdict.evidence["judge"][0]["error"]


def test_a_judge_who_never_answers_is_an_error(
    case: MakeCase, rubric: Callable[..., HarborRubric], answering: Callable[..., str]
) -> None:
    """No verdict, with every attempt as its detail; unless the task says that the tests will do."""
    url = answering("no", "never", "no")
    with pytest.raises(EvaluatorError) as caught:
        rubric(url).evaluate(case(traces=TRACES))
    assert caught.value.code == "judge_failed"
    assert len(caught.value.detail["judge"]) == 3 and caught.value.detail["rewards"] == {"reward": 0.5}
    verdict = rubric(url, on_judge_failure="tests_only", judge_max_retries=0).evaluate(case(traces=TRACES))
    assert verdict.outcome_reward == 0.5 and verdict.trace_rewards is None
    assert "judge_failure" in verdict.evidence


def test_a_judge_who_is_not_there_is_an_error(case: MakeCase, rubric: Callable[..., HarborRubric]) -> None:
    """After the retries that the task allows."""
    evaluator = rubric(f"http://127.0.0.1:{free_port()}/v1", judge_max_retries=1)
    with pytest.raises(EvaluatorError, match="2 attempts") as caught:
        evaluator.evaluate(case(traces=TRACES))
    assert caught.value.code == "judge_failed"


def test_a_judge_who_refuses_is_asked_once(
    case: MakeCase, rubric: Callable[..., HarborRubric], answering: Callable[..., str]
) -> None:
    """A 404 will not be another answer in a moment."""
    with pytest.raises(EvaluatorError, match="1 attempts.*HTTP 404"):
        rubric(answering(GOOD) + "/nowhere").evaluate(case(traces=TRACES))


def test_a_judge_is_asked_only_where_it_may_be(
    case: MakeCase, rubric: Callable[..., HarborRubric], answering: Callable[..., str]
) -> None:
    """With POLAR_JUDGE_ALLOW set, at its hosts and nowhere else; the stage asks before anything is sent."""

    def allow(hosts: str) -> Callable[[str], None]:
        return partial(check_url, allow=hosts, field="judge_base_url", setting="POLAR_JUDGE_ALLOW")

    evaluator = rubric(answering(GOOD))
    with pytest.raises(EvaluatorError, match="POLAR_JUDGE_ALLOW") as caught:
        evaluator.evaluate(case(traces=TRACES, check_url=allow("judge.example.com")))
    assert caught.value.code == "judge_refused"
    assert evaluator.evaluate(case(traces=TRACES, check_url=allow("127.0.0.1"))).trace_rewards is not None


def test_the_rubric_of_a_file(
    case: MakeCase, rubric: Callable[..., HarborRubric], answering: Callable[..., str], tmp_path: Path
) -> None:
    """Without criteria, one of them: the text beside the tests; without that, an error."""
    answer = json.dumps({"traces": [{"scores": {"rubric": 5}}] * 2})
    evaluator = rubric(answering(answer), criteria=[])
    with pytest.raises(EvaluatorError) as caught:
        evaluator.evaluate(case(traces=TRACES))
    assert caught.value.code == "no_rubric"
    (tmp_path / "of the task/rubric.md").write_text("Be kind.")
    assert evaluator.evaluate(case(traces=TRACES)).outcome_reward == pytest.approx(0.7)


def test_the_question_has_everything_and_no_end_that_can_be_forged(
    case: MakeCase, rubric: Callable[..., HarborRubric]
) -> None:
    """Criteria with weights, the tests' words, each part; fenced by a line that differs each time."""
    evaluator = rubric("http://127.0.0.1:1/v1", max_section_chars=300)
    tested = super(HarborRubric, evaluator).evaluate(judged := case(traces=TRACES))
    first, again = (evaluator._question(judged, evaluator.config.criteria, tested) for _ in range(2))
    text = first[1]["content"]
    assert "clear (weight 3)" in text and "part 0" in text and "part 1" in text and '"reward": 0.5' in text
    assert first[0]["content"] != again[0]["content"]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"judge_base_url": "file:///etc/passwd"}, "judge_base_url"),
        ({"criteria": [CRITERIA[0], CRITERIA[0]]}, "criteria"),
        ({"criteria": [{"name": "a b", "description": "x"}]}, "criteria.0.name"),
        ({"criteria": [{"name": "a", "description": "x", "weight": 0}]}, "criteria.0.weight"),
        ({"on_judge_failure": "ignore"}, "on_judge_failure"),
    ],
)
def test_settings_that_cannot_be(rubric: Callable[..., HarborRubric], config: dict[str, Any], field: str) -> None:
    """A wrong setting is refused when the evaluator is made, at its own path."""
    with pytest.raises(SpecError) as caught:
        rubric("http://localhost/v1", **config)
    assert caught.value.errors[0][0] == f"evaluator.config.{field}"
