"""The kinds of data: which sessions make a record together, and what the record looks like.

A kind picks from candidates, which are small; the picked sessions are then read once more, with their tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

from polar.client.types import Json, SessionResult, Trace
from polar.exporting.filters import Filters
from polar.exporting.split import fraction

TOKENS = ("input_ids", "loss_mask", "logprobs")
ORIGIN = (
    *("session_id", "trace", "task_id", "group", "harness", "model", "ended_at"),
    *("reward", "fidelity", "flags"),
)
ANSWER = ("", "_session", "_trace", "_reward", "_fidelity", *(f"_{name}" for name in TOKENS))
Entry = tuple[str, ...]
"""Ids of the sessions that make a record together, in the order that `rows` wants."""


class Candidate(NamedTuple):
    """A session that passed the filters."""

    session_id: str
    group: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Kind(ABC):
    """One kind of data."""

    seed: int = 0
    """Breaks ties between sessions of the same reward."""
    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    """Of its records, all of which have them all."""

    @abstractmethod
    def pick(self, candidates: Sequence[Candidate]) -> Iterator[Entry]:
        """What becomes a record; no session is in two."""

    @abstractmethod
    def rows(self, results: Sequence[SessionResult], filters: Filters) -> Iterator[Json]:
        """The records of one entry's sessions."""

    def to_json(self) -> Json:
        """For the manifest."""
        return {"kind": self.name, **asdict(self)}

    def _best_first(self, candidates: Iterable[Candidate]) -> Iterator[tuple[str, list[Candidate]]]:
        """Each group's sessions that have a reward, best first."""
        rewarded = sorted((each for each in candidates if each.reward is not None), key=lambda each: each.group)
        for group, members in groupby(rewarded, key=lambda each: each.group):
            yield group, sorted(members, key=lambda each: (-(each.reward or 0.0), fraction(self.seed, each.session_id)))


@dataclass(frozen=True, slots=True)
class Sft(Kind):
    """Every session, one record a trace: messages, and the tokens as they were sampled."""

    name = "sft"
    columns = (*ORIGIN, "messages", "tools", *TOKENS)

    def pick(self, candidates: Sequence[Candidate]) -> Iterator[Entry]:
        for each in candidates:
            yield (each.session_id,)

    def rows(self, results: Sequence[SessionResult], filters: Filters) -> Iterator[Json]:
        for result in results:
            for number, trace in filters.traces(result):
                yield {**_origin(result, number, trace), **_whole(trace)}


@dataclass(frozen=True, slots=True)
class Rejection(Sft):
    """The best sessions of each group, as Sft writes them."""

    keep: int = 1
    """Sessions of a group."""
    name = "rejection"

    def pick(self, candidates: Sequence[Candidate]) -> Iterator[Entry]:
        for _, members in self._best_first(candidates):
            for each in members[: self.keep]:
                yield (each.session_id,)


@dataclass(frozen=True, slots=True)
class Preference(Kind):
    """Pairs of one group: the best with the worst, the second best with the second worst, while they are apart."""

    pairs: int = 1
    """Of a group, at most."""
    margin: float = 0.1
    """By which the chosen one's reward is larger, at least."""
    name = "preference"
    columns = (
        *("group", "task_id", "harness", "prompt", "tools"),
        *(word + part for word in ("chosen", "rejected") for part in ANSWER),
    )

    def pick(self, candidates: Sequence[Candidate]) -> Iterator[Entry]:
        for _, members in self._best_first(candidates):
            for number in range(min(self.pairs, len(members) // 2)):
                best, worst = members[number], members[-1 - number]
                if (best.reward or 0.0) - (worst.reward or 0.0) < self.margin:
                    break
                yield best.session_id, worst.session_id

    def rows(self, results: Sequence[SessionResult], filters: Filters) -> Iterator[Json]:
        (first, chosen), (second, rejected) = (_longest(result, filters) for result in results)
        better, worse = results
        row = {"group": group_of(better), "task_id": better.task_id, "harness": better.metadata.get("harness")}
        row |= {"prompt": chosen.raw.get("prompt_messages") or [], "tools": chosen.raw.get("tools")}
        for word, result, number, trace in (("chosen", better, first, chosen), ("rejected", worse, second, rejected)):
            row |= {word: _answer(chosen, trace), f"{word}_session": result.session_id, f"{word}_trace": number}
            row |= {f"{word}_reward": result.reward, f"{word}_fidelity": trace.fidelity}
            row |= {f"{word}_{name}": value for name, value in _tokens(trace).items()}
        yield row


KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Sft, Preference, Rejection)}


def group_of(result: SessionResult) -> str:
    """What must not be split: the task's `metadata.group_id`, or the task."""
    named = result.task_metadata.get("group_id")
    return result.task_id if named is None else str(named)


def _origin(result: SessionResult, number: int, trace: Trace) -> Json:
    return {
        "session_id": result.session_id,
        "trace": number,
        "task_id": result.task_id,
        "group": group_of(result),
        "harness": result.metadata.get("harness"),
        "model": result.trajectory.metadata.get("model_used"),
        "ended_at": result.metadata.get("ended_at"),
        "reward": trace.reward if trace.reward is not None else result.reward,
        "fidelity": trace.fidelity,
        "flags": list(trace.flags),
    }


def _whole(trace: Trace) -> Json:
    return {"messages": trace.messages, "tools": trace.raw.get("tools"), **_tokens(trace)}


def _tokens(trace: Trace) -> Json:
    """One stream of tokens; the mask and the log-probabilities stand beside all of it."""
    prompt = len(trace.prompt_ids)
    logprobs = None if trace.logprobs is None else [0.0] * prompt + trace.logprobs
    return {
        "input_ids": trace.prompt_ids + trace.response_ids,
        "loss_mask": [0] * prompt + trace.loss_mask,
        "logprobs": logprobs,
    }


def _longest(result: SessionResult, filters: Filters) -> tuple[int, Trace]:
    """The trace with the most sampled tokens: the main agent's, as a rule."""
    return max(filters.traces(result), key=lambda pair: (pair[1].sampled_tokens, -pair[0]))


def _answer(prompt: Trace, trace: Trace) -> list[Json]:
    """What follows the chosen one's prompt. An agent that began otherwise is shown from its own beginning."""
    shared = prompt.raw.get("prompt_messages") or []
    own = trace.messages
    return own[len(shared) :] if own[: len(shared)] == shared else own
