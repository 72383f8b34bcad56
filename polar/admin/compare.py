"""Two sessions side by side: what differs in their figures, and the first message at which they part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import orjson
from flask import request
from sqlalchemy.orm import Session

from polar import listing, queries, slices
from polar.admin.page import blueprint, database, page
from polar.admin.story import timeline
from polar.admin.words import decimal, milliseconds
from polar.lifecycle import STAGES, Stage
from polar.models import RolloutSession

MESSAGES = 60
"""Pairs that are shown."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    session: RolloutSession
    task_id: str
    messages: list[dict[str, Any]]
    traces: list[Any]
    timeline: Any


@blueprint.get("/compare")
@page("admin/compare.html")
def compare() -> dict[str, Any]:
    """The page; without two ids, a form that asks for them."""
    asked = [each.strip() for each in (request.args.getlist("pick") + ["", ""])[:2]]
    ids = [request.args.get("a", "").strip() or asked[0], request.args.get("b", "").strip() or asked[1]]
    if not all(ids):
        return {"ids": ids, "sides": None, "picked": len(request.args.getlist("pick"))}
    with database() as db:
        one, other = (_side(db, each) for each in ids)
    pairs = list(zip_longest(one.messages, other.messages))
    parting = next((n for n, pair in enumerate(pairs) if _spoken(pair[0]) != _spoken(pair[1])), None)
    first = max(0, (parting or 0) - 1) if parting is None or parting > 4 else 0
    return {
        "ids": ids,
        "sides": (one, other),
        "facts": _facts(one, other),
        "parting": parting,
        "first": first,
        "pairs": list(enumerate(pairs[first : first + MESSAGES], first)),
        "more": len(pairs) > first + MESSAGES,
    }


def _side(db: Session, session_id: str) -> Side:
    row = queries.session(db, session_id)
    traces = listing.traces_of(db, [session_id]).get(session_id, [])
    messages: list[dict[str, Any]] = []
    if traces:
        longest = max(traces, key=lambda trace: trace.prompt_tokens + trace.response_tokens)
        body = slices.body_of(db, session_id, longest.number)
        messages = [*body["prompt_messages"], *body["response_messages"]]
    story = timeline(row, listing.events_of(db, session_id), [])
    return Side(row, row.task.task_id, messages, traces, story)


def _spoken(message: dict[str, Any] | None) -> bytes | None:
    """A message without the ids that differ by chance."""
    if message is None:
        return None
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return orjson.dumps([message.get("role"), message.get("content") or "", calls])


def _facts(one: Side, other: Side) -> list[tuple[str, str, str, bool]]:
    """(name, left, right, whether they differ in more than time, which always differs)."""

    def row(name: str, read: Any, timed: bool = False) -> tuple[str, str, str, bool]:
        left, right = read(one), read(other)
        return name, left, right, left != right and not timed

    rows = [
        row("task", lambda side: side.task_id),
        row("state", lambda side: side.session.state.replace("_", " ")),
        row("reward", lambda side: decimal(side.session.reward)),
        row("turns", lambda side: str(side.session.turns)),
        row("sampled tokens", lambda side: str(side.session.sampled_tokens)),
        row("traces", lambda side: str(len(side.traces))),
        row("fidelity", lambda side: ", ".join(sorted({trace.fidelity for trace in side.traces})) or "–"),
        row("flags", lambda side: ", ".join(sorted(_flags(side))) or "none"),
        row("attempt", lambda side: str(side.session.attempt)),
        row("lane", lambda side: side.session.lane or "–"),
        row("agent", lambda side: str((side.session.agent_exit or {}).get("state", "–"))),
        row("error", lambda side: str((side.session.error or {}).get("message", "–"))),
    ]
    for stage in STAGES:
        rows.append(row(f"{stage} ran", partial(_ran, stage), timed=True))
    return rows


def _ran(stage: Stage, side: Side) -> str:
    return milliseconds(side.session.timing.get(stage, {}).get("run_ms"))


def _flags(side: Side) -> set[str]:
    return {flag for trace in side.traces for flag in trace.certificate.get("flags", ())}
