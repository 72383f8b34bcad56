"""Recorded calls asked anew: prompts put together, and the first token that differs. Real engines are in tests/e2e."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polar.engines.base import Generation
from polar.messages import Sampling
from polar.regeneration import How, Recorded, Regenerated, calls, regenerate


class Saying:
    """An engine with one answer, that remembers how it was asked."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str) -> Generation:
        self.asked.append((prompt_ids, sampling))
        return Generation(self.answer, [-0.25] * len(self.answer), "stop")

    async def score(self, ids: list[int]) -> list[float | None]:
        return [None, *(-2.0 for _ in ids[1:])]


def row(
    name: str, parent: str | None, prompt: int, suffix: list[int], output: list[int], **more: Any
) -> dict[str, Any]:
    """A completion as the API has it."""
    found = {"completion_id": name, "parent_id": parent, "prompt_tokens": prompt, "suffix_ids": suffix, "attempt": 1}
    found |= {"output_ids": output, "trim": 0, "outcome": "answered", "sampled_with": {"temperature": 1.0}}
    return {**found, "logprobs": [-0.5] * len(output), **more}


def test_prompts_are_put_together() -> None:
    """A prompt is the parent's, its output less what history does not keep, and the rest."""
    found = calls(
        [row("a", None, 2, [1, 2], [3, 4]), row("b", "a", 5, [8, 9], [5], trim=1), row("c", "a", 5, [7], [6])]
    )
    assert [call.prompt_ids for call in found] == [[1, 2], [1, 2, 3, 8, 9], [1, 2, 3, 4, 7]]


def test_a_prompt_that_does_not_add_up_is_not_known() -> None:
    """Nor one whose parent is not there; and only answers of the last attempt are looked at."""
    rows = [
        row("x", None, 2, [1, 2], [3], attempt=0),
        row("a", None, 3, [1, 2], [3]),
        row("b", "gone", 3, [1], [3]),
        row("c", None, 2, [1, 2], [3], outcome="failed"),
    ]
    found = calls(rows)
    assert [(call.completion_id, call.prompt_ids) for call in found] == [("a", None), ("b", None)]
    assert asked(found[0], [3]).reason == "its prompt is not known"


def asked(call: Recorded, answer: list[int], how: How = "auto") -> Regenerated:
    """What comes of it with an engine that answers so."""
    return asyncio.run(regenerate(Saying(answer), call, how))  # type: ignore[arg-type]


CALL = Recorded("a", 0, [1, 2], [3, 4, 5], [-0.5, -0.5, -0.5], {"temperature": 1.0, "max_tokens": 48})


def test_the_first_token_that_differs() -> None:
    """With what was before it and how likely each was to whom."""
    found = asked(CALL, [3, 9, 5])
    assert (found.same, found.position, found.before) == (False, 1, [3])
    assert found.recorded is not None and (found.recorded.id, found.recorded.logprob) == (4, -0.5)
    assert found.other is not None and (found.other.id, found.other.logprob) == (9, -0.25)
    assert (found.recorded_by_other, found.mean_difference) == (-2.0, 1.5)


def test_the_same_answer_differs_nowhere() -> None:
    """And one that ends early differs where it ends."""
    assert asked(CALL, [3, 4, 5]).same is True
    short = asked(CALL, [3])
    assert short.position == 1 and short.other is not None and short.other.id is None


@pytest.mark.parametrize(
    ("told", "how", "sampled"),
    [
        ({"temperature": 1.0}, "auto", "greedy"),
        ({"temperature": 1.0, "seed": 7}, "auto", "recorded"),
        ({"temperature": 0}, "auto", "recorded"),
        ({"temperature": 1.0}, "recorded", "recorded"),
        ({"temperature": 1.0, "seed": 7}, "greedy", "greedy"),
    ],
)
def test_how_it_is_asked(told: dict[str, Any], how: How, sampled: str) -> None:
    """As recorded where that can be repeated, and never for more tokens than there are to compare."""
    engine = Saying([3, 4, 5])
    call = Recorded("a", 0, [1, 2], [3, 4, 5], None, {**told, "max_tokens": 48, "stop": ["x"]})
    found = asyncio.run(regenerate(engine, call, how))  # type: ignore[arg-type]
    ((prompt, sampling),) = engine.asked
    assert (found.asked, prompt, sampling.max_tokens, sampling.stop) == (sampled, [1, 2], 3, ("x",))
    assert sampling.temperature == (0.0 if sampled == "greedy" else told["temperature"])
    assert sampling.seed == (told.get("seed") if sampled == "recorded" else None)
