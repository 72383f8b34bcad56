"""A session's story for people: its events as a timeline, its calls as a tree, and what its flags mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from sqlalchemy import Row

from polar.admin import charts
from polar.admin.charts import Piece
from polar.admin.words import span
from polar.builders import certificate
from polar.lifecycle import OPEN, STAGES, State
from polar.models import RolloutSession, SessionEvent, now

MAX_DRAWN = 300
"""Calls that the timeline shows one by one."""
DEEPEST = 8
"""Levels by which a tree is indented."""
SENTENCES = {
    name: sentence
    for names, sentence in re.findall(
        r"^ {4}([a-z_]+(?:, [a-z_]+)*) {2,}(.*)$", certificate.__doc__ or "", re.MULTILINE
    )
    for name in names.split(", ")
}
MORE_SENTENCES = {
    "stale": "a trained token is further behind the policy than its bound",
    "staleness_unknown": "a bound is set, and its versions cannot all be compared",
}
FIDELITIES = {
    "exact": "every prompt that the engine saw is the beginning of this trace, token for token",
    "drifted": "the engine saw another prompt than this trace shows",
    "unverified": "the engine did not say which prompt it saw",
}


def explain(word: str) -> str:
    """What a flag or a fidelity means; empty for one that only its maker knows."""
    return FIDELITIES.get(word) or SENTENCES.get(word) or MORE_SENTENCES.get(word, "")


def timeline(row: RolloutSession, events: Sequence[SessionEvent], calls: Sequence[Row[Any]]) -> Markup | None:
    """Stages and waits as stretches on one scale, and the model calls below them."""
    if not events:
        return None
    begin, end = events[0].at, row.ended_at or now()
    seconds = max((end - begin).total_seconds(), 0.001)
    pieces = [piece for piece in _stages(row, events, begin) if piece is not None]
    for call in calls[:MAX_DRAWN]:
        start = (call.requested_at - begin).total_seconds()
        stop = ((call.finished_at or end) - begin).total_seconds()
        label = f"{call.role} call, {call.outcome}: {span(max(stop - start, 0))}, {call.output_tokens} tokens"
        pieces.append(Piece("model calls", f"call {call.role}", max(start, 0.0), max(stop, start, 0.0), label))
    rows = [*STAGES, *(["model calls"] if calls else [])]
    told = ", ".join(f"{stage} {span(_run(row, stage))}" for stage in STAGES if _run(row, stage) is not None)
    return charts.gantt(pieces, rows, seconds, f"{span(seconds)} in all: {told or 'nothing ran yet'}")


def _stages(row: RolloutSession, events: Sequence[SessionEvent], begin: Any) -> list[Piece | None]:
    """From each event to the next one, the stage and state that it began."""
    last = row.ended_at or now()
    ends = [event.at for event in events[1:]] + [last]
    found: list[Piece | None] = []
    for event, until in zip(events, ends, strict=True):
        start, stop = (event.at - begin).total_seconds(), (until - begin).total_seconds()
        if event.state not in OPEN:
            found.append(Piece(event.stage, f"end {event.state}", start, start, event.state))
            continue
        word = "waits" if event.state == State.QUEUED else "runs"
        kind = "wait" if event.state == State.QUEUED else f"run {event.stage}"
        label = f"{event.stage} {word}: {span(stop - start)}, attempt {event.attempt}"
        found.append(Piece(event.stage, kind, start, max(stop, start), label))
        if event.move == "retry":
            found.append(Piece(event.stage, "retry", start, start, f"tried again: {event.note.get('message', '')}"))
    return found


def _run(row: RolloutSession, stage: str) -> float | None:
    spent = row.timing.get(stage, {}).get("run_ms")
    return None if spent is None else spent / 1000


@dataclass(slots=True)
class Branch:
    """Calls that follow each other without a fork."""

    depth: int
    calls: list[Row[Any]]
    children: int = 0
    """How many branches go on from its end."""

    @property
    def head(self) -> Row[Any]:
        """Its first call."""
        return self.calls[0]

    @property
    def leaf(self) -> Row[Any]:
        """Its last call."""
        return self.calls[-1]

    @property
    def tokens(self) -> int:
        """Sampled on it."""
        return sum(call.output_tokens for call in self.calls)

    @property
    def flags(self) -> list[str]:
        """Of any of its calls."""
        return sorted({flag for call in self.calls for flag in call.flags})


def flat_tree(calls: Sequence[Row[Any]]) -> list[Branch]:
    """The forest of calls, a fork being where more than one call goes on; in reading order."""
    known = {call.id for call in calls}
    children: dict[str, list[Row[Any]]] = {}
    roots = []
    for call in calls:
        if call.parent_id in known:
            children.setdefault(call.parent_id, []).append(call)
        else:
            roots.append(call)
    found: list[Branch] = []
    waiting = [(0, root) for root in reversed(roots)]
    while waiting:
        depth, call = waiting.pop()
        branch = Branch(min(depth, DEEPEST), [call])
        while len(following := children.get(branch.leaf.id, [])) == 1 and following[0].role == branch.head.role:
            branch.calls.append(following[0])
        branch.children = len(following)
        waiting += [(depth + 1, child) for child in reversed(following)]
        found.append(branch)
    return found
