"""Samples: a session's result made flat, one for each trace that may train. Arrays are numpy's; no trainer is imported.

    sample.prompt_ids + sample.response_ids      the whole stream; loss_mask, logprobs stand beside response_ids
    sample.weight                                 1 / number of the session's samples: a session counts once
    sample.group_id                               what advantages compare: the task, or its metadata.group_id

Putting sessions into groups is `groups`' affair, advantages `advantages`', padding `batches`', files `storage`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polar.client.types import SessionResult, Trace

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.uint8]
GroupBy = Literal["task_id", "group_id"]


class SampleError(ValueError):
    """What was handed over cannot be trained on; the text names the session and says what to do."""


class Span(NamedTuple):
    """Sampled by one version of the policy: response tokens start to end."""

    version: int | str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sample:
    """One token stream, flat."""

    prompt_ids: Ids
    """[P]"""
    response_ids: Ids
    """[R] sampled tokens and what the harness put between them."""
    loss_mask: Mask
    """[R] 1 where the policy sampled the token."""
    logprobs: Floats | None
    """[R] at which it was sampled, 0.0 where the mask is 0; None only where the trace may not train."""
    reward: float | None
    weight: float
    session_id: str
    task_id: str
    group_id: str
    """What its advantage is relative to."""
    trace: int
    """Which of its session's traces."""
    versions: tuple[Span, ...] = ()
    """Which policy version sampled what; empty where it is not known."""
    fidelity: str = "unverified"
    flags: tuple[str, ...] = ()
    finish_reason: str | None = None
    status: str = "COMPLETED"
    """Of the session: COMPLETED, TIMEOUT or ERROR."""
    trainable: bool = True
    advantage: float | None = None
    """Of every token of it; None until `advantages` was asked."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of the task, as it was submitted."""
    turns: int = 0
    """Completions that the trace holds."""

    @property
    def ids(self) -> Ids:
        """[P + R] the whole stream."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def sampled_tokens(self) -> int:
        """Tokens that carry the mask."""
        return int(np.count_nonzero(self.loss_mask))

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def segments(self) -> list[tuple[bool, int, int]]:
        """(sampled, start, end) over the response, in turn: what the policy sampled, what was put between."""
        if not len(self.loss_mask):
            return []
        edges = np.flatnonzero(np.diff(self.loss_mask)) + 1
        bounds = [0, *edges.tolist(), len(self.loss_mask)]
        return [(bool(self.loss_mask[start]), start, end) for start, end in zip(bounds, bounds[1:], strict=False)]

    def version_per_token(self, unknown: int = -1) -> NDArray[np.int64]:
        """[R] the version that sampled each token; `unknown` where none did or it is no whole number."""
        found = np.full(len(self.response_ids), unknown, np.int64)
        for span in self.versions:
            if (version := whole(span.version)) is not None:
                found[span.start : span.end] = version
        found[self.loss_mask == 0] = unknown
        return found


def samples_of(
    result: SessionResult | Mapping[str, Any], *, trainable_only: bool = True, group_by: GroupBy = "task_id"
) -> list[Sample]:
    """A session's samples: one for each trace that may train; none of a session that has none.

    With `trainable_only` unset, the others too, with weight 0. Raises SampleError for a summary, which has no tokens,
    and for a tree with branches, which is no line."""
    ended = result if isinstance(result, SessionResult) else SessionResult.read(dict(result))
    group = ended.task_id
    if group_by == "group_id":
        named = ended.task_metadata.get("group_id")
        group = group if named is None else str(named)
    return [
        _sample(ended, number, trace, group)
        for number, trace in enumerate(ended.traces)
        if trace.trainable or not trainable_only
    ]


def staleness(sample: Sample, version: int) -> int | None:
    """How many versions the oldest trained token is behind; None if that is not known of every trained token."""
    trained = sample.version_per_token()[sample.loss_mask == 1]
    if not len(trained) or trained.min() < 0:
        return None
    return version - int(trained.min())


def fresh(
    samples: Iterable[Sample], version: int, bound: int, *, unknown: Literal["keep", "drop"] = "drop"
) -> list[Sample]:
    """Samples at most `bound` versions behind `version`, weighed anew; `unknown` is of those without versions."""
    kept = []
    for sample in samples:
        behind = staleness(sample, version)
        if unknown == "keep" if behind is None else behind <= bound:
            kept.append(sample)
    return reweigh(kept)


def reweigh(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, each weighing 1 / how many of its session there are: a session counts once again."""
    count = Counter(sample.session_id for sample in samples)
    for sample in samples:
        sample.weight = 1 / count[sample.session_id]
    return list(samples)


def whole(version: object) -> int | None:
    """A version as a whole number, if it is one."""
    if isinstance(version, bool):
        return None
    if isinstance(version, int):
        return version
    return int(version) if isinstance(version, str) and version.isdecimal() else None


def _sample(ended: SessionResult, number: int, trace: Trace, group: str) -> Sample:
    place = f"session {ended.session_id}, trace {number}"
    if "prompt_ids" not in trace.raw:
        raise SampleError(f"{place}: a summary has no tokens; read results in full")
    if "branched" in trace.flags and trace.trainable:
        raise SampleError(f"{place}: a tree with branches is no line; use the builder prefix_merging")
    versions = tuple(Span(each["version"], each["start"], each["end"]) for each in trace.policy_versions)
    sample = Sample(
        prompt_ids=np.asarray(trace.prompt_ids, np.int32),
        response_ids=np.asarray(trace.response_ids, np.int32),
        loss_mask=np.asarray(trace.loss_mask, np.uint8),
        logprobs=None if trace.logprobs is None else np.asarray(trace.logprobs, np.float32),
        reward=trace.reward,
        weight=trace.weight if trace.trainable else 0.0,
        session_id=ended.session_id,
        task_id=ended.task_id,
        group_id=group,
        trace=number,
        versions=versions,
        fidelity=trace.fidelity,
        flags=trace.flags,
        finish_reason=trace.finish_reason,
        status=ended.status,
        trainable=trace.trainable,
        metadata=ended.task_metadata,
        turns=int(trace.certificate.get("completions", 0)),
    )
    return checked(sample)


def checked(sample: Sample) -> Sample:
    """The sample, if its arrays line up. Raises SampleError."""
    place = f"session {sample.session_id}, trace {sample.trace}"
    length = len(sample.response_ids)
    if len(sample.loss_mask) != length or (sample.logprobs is not None and len(sample.logprobs) != length):
        raise SampleError(f"{place}: mask and log-probabilities do not line up with its {length} response tokens")
    if sample.trainable and (sample.logprobs is None or not np.isfinite(sample.logprobs).all()):
        raise SampleError(f"{place}: may train, and has not a finite log-probability for each token")
    return sample
