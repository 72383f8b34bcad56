"""Every row of docs/rewards.md, over everything that it covers, and what no table says: weights and bad verdicts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.errors import EvaluatorError
from polar.evaluators.base import Verdict
from polar.rewards import UNTRAINABLE, Decision, Ending, TraceFacts, decide

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
REWARD = 0.25
VALUES = {
    "session": ["completed", "failed", "timed_out", "cancelled"],
    "agent": ["completed", "timed_out", "failed", "cancelled", "none"],
    "trajectory": ["yes", "no"],
    "verdict": ["given", "abstained", "missing", "unasked"],
    "sampled": ["some", "0"],
    "flags": [*UNTRAINABLE, "sibling", "nothing"],
    "strict": ["yes", "no"],
    "fidelity": ["exact", "drifted", "unverified"],
}
VERDICTS = {"given": Verdict(REWARD), "abstained": Verdict(None), "missing": None, "unasked": None}


def table() -> list[dict[str, str]]:
    """The rows of the page's table, by column."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def matches(row: dict[str, str], situation: dict[str, str]) -> bool:
    for column, value in situation.items():
        cell = row[column]
        if cell.startswith("!"):
            if value == cell[1:]:
                return False
        elif cell != "*" and value not in cell.split("/"):
            return False
    return True


def situations() -> Iterator[dict[str, str]]:
    for values in itertools.product(*VALUES.values()):
        yield dict(zip(VALUES, values, strict=True))


def decided(situation: dict[str, str]) -> Decision:
    facts = TraceFacts(
        situation["fidelity"],
        () if situation["flags"] == "nothing" else (situation["flags"],),
        0 if situation["sampled"] == "0" else 7,
    )
    agent = None if situation["agent"] == "none" else situation["agent"]
    [decision] = decide(
        Ending(agent, situation["trajectory"] == "yes", situation["session"]),
        [facts],
        verdict=VERDICTS[situation["verdict"]],
        evaluator=None if situation["verdict"] == "unasked" else "command",
        strict=situation["strict"] == "yes",
        builder="per_request",
    )
    return decision


def test_the_table_and_the_function_agree_everywhere() -> None:
    """For every combination of values, the first row that matches says what decide() does."""
    rows = table()
    for situation in situations():
        row = next(row for row in rows if matches(row, situation))
        given = REWARD if situation["verdict"] == "given" else None
        expected = (row["rule"], given if row["reward"] == "verdict" else None, row["trainable"] == "yes")
        decision = decided(situation)
        assert (decision.rule, decision.reward, decision.trainable) == expected, situation
        assert decision.reason
        assert decision.weight == (1.0 if decision.trainable else 0.0)


def test_every_row_decides_something() -> None:
    """No row of the table is hidden behind the ones before it, and each knows only values that exist."""
    rows = table()
    deciding = {id(next(row for row in rows if matches(row, each))) for each in situations()}
    assert deciding == {id(row) for row in rows}
    for row in rows:
        for column, values in VALUES.items():
            assert row[column] == "*" or set(row[column].lstrip("!").split("/")) <= set(values), row


def judge(verdict: Verdict, *facts: TraceFacts, strict: bool = False) -> list[Decision]:
    return decide(
        Ending("completed", True),
        facts,
        verdict=verdict,
        evaluator="command",
        strict=strict,
        builder="prefix_merging",
    )


SOUND = TraceFacts("exact", (), 3)
DRIFTED = TraceFacts("drifted", (), 3)
EMPTY = TraceFacts("exact", ("shared_prefix",), 0)


def test_a_session_counts_once() -> None:
    """Weights of the trainable traces add up to one, and the others weigh nothing."""
    decisions = judge(Verdict(1.0), SOUND, DRIFTED, EMPTY, SOUND, strict=True)
    assert [each.weight for each in decisions] == [0.5, 0.0, 0.0, 0.5]
    assert [each.reward for each in decisions] == [1.0] * 4


def test_trace_rewards_win_over_the_outcome() -> None:
    """Each trace gets its own; one without any is not trained, even if there is an outcome reward."""
    decisions = judge(Verdict(1.0, [0.5, None]), SOUND, SOUND)
    assert [(each.reward, each.trainable) for each in decisions] == [(0.5, True), (None, False)]


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 1.0, 1.0]])
def test_trace_rewards_must_be_one_for_each_trace(rewards: list[float | None]) -> None:
    """Another number of entries is the evaluator's fault, and says both numbers."""
    with pytest.raises(EvaluatorError, match=f"gave {len(rewards)} trace_rewards.* built 2 traces") as caught:
        judge(Verdict(1.0, rewards), SOUND, SOUND)
    assert caught.value.code == "trace_rewards_mismatch"


@pytest.mark.parametrize("reward", [True, False, math.nan, math.inf, -math.inf, "1", np.bool_(True)])
def test_what_is_no_finite_number_is_no_reward(reward: Any) -> None:
    """Booleans, NaN, infinities and text are refused wherever a verdict holds them."""
    for verdict in (Verdict(reward), Verdict(None, [reward])):
        with pytest.raises(EvaluatorError, match="must be a finite number"):
            judge(verdict, SOUND)


def test_numbers_of_other_kinds_become_floats() -> None:
    """An int or a numpy number is a reward like any other."""
    for number in (1, np.float32(1), np.int64(1)):
        [decision] = judge(Verdict(number), SOUND)  # type: ignore[arg-type]
        assert decision.reward == 1.0
        assert isinstance(decision.reward, float)


def test_no_traces_no_decisions() -> None:
    """A session without traces has nothing to decide, and no weight to divide."""
    assert judge(Verdict(0.0)) == []
