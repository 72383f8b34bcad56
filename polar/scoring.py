"""Against the engine, not against ourselves: the log-probability of each trained token, computed once more.

A trace is scored from its own arrays alone, in one forward pass for each line of tokens that it holds, and compared
with what was recorded when its tokens were sampled. If any token had been sampled behind another prefix than the
trace shows, the two would differ. Reads traces as the REST API gives them; fetching them is the caller's affair.

An engine scores at temperature 1, so a token is compared only if its call sampled at temperature 1 or greedily (for
which engines report the untempered value) and without top-p, top-k, min-p or penalties; the others are counted by
the reason why not, as are tokens of other weights than the engine has now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar.engines.base import Engine

NEUTRAL: Mapping[str, tuple[float | None, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
}
"""Settings under which the recorded log-probability is the model's own."""
OTHER_SAMPLING, OTHER_WEIGHTS, NO_LOGPROB = "other sampling", "other weights", "no log-probability"
Bools = NDArray[np.bool_]


@dataclass(slots=True)
class Comparison:
    """Recorded and recomputed log-probabilities of one trace or of many."""

    trained: int = 0
    compared: int = 0
    total: float = 0.0
    """Of the absolute differences."""
    maximum: float = 0.0
    worst: int | None = None
    """The response token that differs most."""
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def mean(self) -> float | None:
        """Mean absolute difference; None if nothing was compared."""
        return self.total / self.compared if self.compared else None

    def add(self, other: Comparison) -> None:
        """Take another trace in."""
        self.trained += other.trained
        self.compared += other.compared
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)
        self.skipped += other.skipped

    def to_json(self) -> dict[str, Any]:
        """Plain values, for programs."""
        return {
            "trained_tokens": self.trained,
            "compared_tokens": self.compared,
            "mean_difference": self.mean,
            "max_difference": self.maximum,
            "worst_token": self.worst,
            "skipped": dict(self.skipped),
        }


@dataclass(frozen=True, slots=True)
class Line:
    """Tokens that were seen one after the other, and which of them are compared here."""

    ids: list[int]
    places: NDArray[np.int64]
    """Of the compared ones in `ids`."""
    responses: NDArray[np.int64]
    """Of the same in the trace's response."""


async def compare(engine: Engine, trace: Mapping[str, Any], weight_version: str | None = None) -> Comparison:
    """Score one trace. Raises EngineError."""
    found = Comparison(trained=int(sum(trace["loss_mask"])))
    left = _comparable(trace, weight_version, found.skipped)
    recorded = trace["response_logprobs"]
    for line in lines(trace, left):
        scores = await engine.score(line.ids)
        for place, response in zip(line.places.tolist(), line.responses.tolist(), strict=True):
            score = scores[place]
            if score is None:
                # Nothing stands before the first token of a line, so an engine has nothing to say of it.
                found.skipped[NO_LOGPROB] += 1
                continue
            difference = abs(score - recorded[response])
            found.compared += 1
            found.total += difference
            if difference >= found.maximum:
                found.maximum, found.worst = difference, response
    return found


def lines(trace: Mapping[str, Any], wanted: Bools) -> Iterator[Line]:
    """The lines of a trace that hold all `wanted` response tokens, each of these once: of a tree, its paths."""
    prompt = len(trace["prompt_ids"])
    stream = np.array([*trace["prompt_ids"], *trace["response_ids"]], np.int64)
    left = np.concatenate([np.zeros(prompt, np.bool_), wanted])
    for places in _paths(trace, len(stream)):
        mine = left[places]
        if mine.any():
            left[places] = False
            yield Line(stream[places].tolist(), np.flatnonzero(mine), places[mine] - prompt)


def _paths(trace: Mapping[str, Any], length: int) -> Iterator[NDArray[np.int64]]:
    """Places in the stream, root first: one path for a line, one for each leaf of a tree."""
    table: Sequence[Mapping[str, Any]] | None = trace["metadata"].get("tree")
    if table is None:
        yield np.arange(length)
        return
    inner = {node["parent"] for node in table}
    for leaf in (index for index in range(len(table)) if index not in inner):
        path, step = [], leaf
        while step >= 0:
            path.append(np.arange(table[step]["start"], table[step]["end"]))
            step = table[step]["parent"]
        yield np.concatenate(path[::-1])


def _comparable(trace: Mapping[str, Any], weight_version: str | None, skipped: Counter[str]) -> Bools:
    """Which response tokens can be compared; the others are counted by why not."""
    mask = np.array(trace["loss_mask"], np.bool_)
    if trace["response_logprobs"] is None:
        skipped[NO_LOGPROB] += int(mask.sum())
        return np.zeros_like(mask)
    sampling = np.zeros_like(mask)
    for line in trace["metadata"]["completion_metadata"]:
        if not neutral(line.get("sampled_with") or {}):
            sampling[line["start"] : line["end"]] = True
    weights = np.zeros_like(mask)
    for span in trace["metadata"]["certificate"]["policy_versions"]:
        if weight_version not in (None, span["version"]):
            weights[span["start"] : span["end"]] = True
    for reason, where in ((OTHER_SAMPLING, mask & sampling), (OTHER_WEIGHTS, mask & ~sampling & weights)):
        if where.any():
            skipped[reason] += int(where.sum())
    return mask & ~sampling & ~weights


def neutral(sampled_with: Mapping[str, Any]) -> bool:
    """Whether a call sampled from the model's own distribution, so that its log-probabilities are the model's own."""
    return all(sampled_with.get(name) in allowed for name, allowed in NEUTRAL.items())
