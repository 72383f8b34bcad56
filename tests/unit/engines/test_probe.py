"""The probe tells what an engine's log-probabilities are of, whatever the engine says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from polar.engines.base import Engine, Generation, LogprobKind, Passport, PromptIds
from polar.engines.logprobs import right_kinds
from polar.engines.probe import probe
from polar.errors import EngineError
from polar.messages import Sampling

LOGITS = np.array([3.0, 1.0, 0.5, -1.0, -2.0])


def log_softmax(values: np.ndarray) -> np.ndarray:
    """Natural log."""
    found: np.ndarray = values - np.log(np.exp(values).sum())
    return found


class Sampler(Engine):
    """Samples from one distribution and reports log-probabilities of a kind."""

    name = "sampler"

    def __init__(self, kind: LogprobKind, *, scores: bool = True, ids: bool = True) -> None:
        self.kind, self.scores, self.ids = kind, scores, ids
        self.random = np.random.default_rng(5)

    async def passport(self) -> Passport:
        return Passport("sampler", "m", None, 100)

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        if not self.ids:
            raise EngineError("stripped", code="no_token_ids")
        tempered = LOGITS / (sampling.temperature or 1.0)
        drawn = np.where(np.arange(5) == LOGITS.argmax(), tempered, -np.inf) if sampling.top_k == 1 else tempered
        ids = self.random.choice(5, size=sampling.max_tokens, p=np.exp(log_softmax(drawn)))
        reported = {"processed": log_softmax(drawn), "tempered": log_softmax(tempered), "raw": log_softmax(LOGITS)}
        values = reported.get(self.kind, LOGITS + 5)[ids]
        return Generation(ids.tolist(), values.tolist(), "length")

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        yield await self.generate(prompt_ids, sampling, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def score(self, ids: list[int]) -> list[float | None]:
        if not self.scores:
            raise EngineError("cannot", code="no_score")
        return [None, *log_softmax(LOGITS)[[token % 5 for token in ids[1:]]].tolist()]


@pytest.mark.parametrize("kind", ["processed", "tempered", "raw", "none"])
def test_kinds(kind: LogprobKind) -> None:
    """What was sampled hot and what a forward pass gives tell the kinds apart; logits are none."""
    assert asyncio.run(probe(Sampler(kind))).logprobs == kind


@pytest.mark.parametrize(("kind", "found"), [("processed", "processed"), ("raw", "unknown"), ("tempered", "unknown")])
def test_without_scores(kind: LogprobKind, found: LogprobKind) -> None:
    """An engine that cannot score is believed only where one answer alone tells."""
    assert asyncio.run(probe(Sampler(kind, scores=False))).logprobs == found


def test_without_ids() -> None:
    """An engine whose ids do not come has a passport that says so, instead of none."""
    found = asyncio.run(probe(Sampler("processed", ids=False)))
    assert (found.ids_out, found.logprobs) == (False, "none")


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(), None),
        (Sampling(temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0), None),
        (Sampling(temperature=0.0), None),
        (Sampling(temperature=0.7), "temperature"),
        (Sampling(temperature=0.7, top_p=0.9), "top_p"),
        (Sampling(top_k=20), "top_k"),
        (Sampling(presence_penalty=0.5), "presence_penalty"),
    ],
)
def test_right_kinds(sampling: Sampling, field: str | None) -> None:
    """Processed ones are always right, tempered ones as long as nothing is cut, raw ones where nothing is changed."""
    needed = right_kinds(sampling)
    assert (needed[0] if needed else None) == field
    if needed is not None:
        assert "processed" in needed[1]
        assert "raw" not in needed[1]
        assert ("tempered" in needed[1]) is (field not in ("top_p", "top_k"))
