"""The statements that record: one for whatever a batch holds, so that its commit is one round trip.

A batch is turned into arrays, one for each column; what is done with each kind of record is one part of a single
WITH. What a record says is `rows`' affair, and when it is written `recorder`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
from sqlalchemy.dialects import postgresql

from polar.lifecycle import Stage, State
from polar.models import Completion, Media

INTENDED = (
    "id",
    "session_id",
    "attempt",
    "outcome",
    "parent_id",
    "parent_reason",
    "dialect",
    "role",
    "model_requested",
    "request",
    "parsed",
    "context_len",
    "prompt_len",
    "suffix_ids",
    "flags",
    "requested_at",
)
"""Columns that the beginning of a call writes."""
SETTLED = (
    "outcome",
    "model_used",
    "answer",
    "parsed",
    "chain_hash",
    "output_ids",
    "logprobs",
    "finish_reason",
    "policy_versions",
    "prompt_verified",
    "flags",
    "engine",
    "error",
    "finished_at",
)
"""Columns that the end of a call writes; each is in every record, because they travel as one statement."""
LEARNED = ("prompt_len", "suffix_ids")
"""Written by the beginning, and by the end where only the engine knew them."""
FENCED = ("id", "session_id", "attempt", "key_hash", "turns", "tokens")
"""What the end of a call brings beside its columns: whose it is, and what it is charged with."""
OTHER = {"key_hash": "BYTEA", "turns": "INTEGER", "tokens": "INTEGER"}

# The tokens of an answer that comes too late were sampled and are kept, but no harness sees them and no builder may
# count them.
LATE = "r.outcome = 'answered' AND h.id IS NULL"
ENDED = """'{"code": "session_ended", "message": "the session moved on before the answer was there"}'::jsonb"""
SPECIAL = {
    "outcome": f"CASE WHEN {LATE} THEN 'failed' ELSE r.outcome END",
    "error": f"CASE WHEN {LATE} THEN {ENDED} ELSE r.error END",
    # What the beginning noted stays, but for what the end knows better.
    "parsed": "c.parsed || r.parsed",
    # An engine that renders by itself says only with its answer what the prompt was.
    **{name: f"coalesce(r.{name}, c.{name})" for name in LEARNED},
}
ENDING = (*SETTLED, *LEARNED)


@dataclass(frozen=True, slots=True)
class Part:
    """What is done with one kind of record."""

    columns: tuple[str, ...]
    text: str
    """Its members of the WITH; `{rows}` stands for its records."""


PARTS: Mapping[str, Part] = {
    "media": Part(
        ("digest", "media_type", "data", "created_at"),
        """media AS (
            INSERT INTO media (digest, media_type, data, created_at)
            SELECT digest, media_type, data, created_at FROM {rows} ORDER BY digest ON CONFLICT DO NOTHING
        )""",
    ),
    # A commit whose acknowledgement was lost is repeated: the row may be there.
    "intent": Part(
        INTENDED,
        f"""intended AS (
            INSERT INTO completions ({", ".join(INTENDED)}, output_ids, policy_versions, engine, delivered)
            SELECT {", ".join(INTENDED)}, '', '[]', '{{}}', false FROM {{rows}} ON CONFLICT DO NOTHING
        )""",
    ),
    # Sessions are locked in the order of their ids: two proxies whose batches name the same ones must not wait for
    # each other. Only what still was open is charged, so that a repeated commit counts nothing twice.
    "settle": Part(
        (*FENCED, *ENDING),
        f"""ends AS MATERIALIZED (SELECT * FROM {{rows}}), held AS MATERIALIZED (
            SELECT s.id, s.attempt, s.key_hash FROM sessions s
            WHERE s.id IN (SELECT session_id FROM ends) AND s.stage = '{Stage.EXECUTE}' AND s.state = '{State.RUNNING}'
            ORDER BY s.id FOR NO KEY UPDATE OF s
        ), due AS MATERIALIZED (
            SELECT h.id, sum(r.turns) AS turns, sum(r.tokens) AS tokens
            FROM ends r JOIN completions c ON c.id = r.id AND c.outcome = 'asked'
            JOIN held h ON h.id = r.session_id AND h.attempt = r.attempt AND h.key_hash = r.key_hash GROUP BY h.id
        ), charged AS (
            UPDATE sessions s SET turns = s.turns + due.turns, sampled_tokens = s.sampled_tokens + due.tokens
            FROM due WHERE s.id = due.id AND (due.turns > 0 OR due.tokens > 0)
        ), settled AS (
            UPDATE completions c SET {", ".join(f"{name} = {SPECIAL.get(name, 'r.' + name)}" for name in ENDING)}
            FROM ends r LEFT JOIN held h
            ON h.id = r.session_id AND h.attempt = r.attempt AND h.key_hash = r.key_hash
            WHERE c.id = r.id AND c.outcome = 'asked'
        )""",
    ),
    "delivered": Part(
        ("id",), "delivered AS (UPDATE completions c SET delivered = true FROM {rows} WHERE c.id = r.id)"
    ),
    "flag": Part(
        ("id", "flags"),
        "flagged AS (UPDATE completions c SET flags = c.flags || r.flags FROM {rows} WHERE c.id = r.id)",
    ),
}


@cache
def statement(kinds: tuple[str, ...]) -> str:
    """The one that writes records of these kinds; its rows are the sessions that still hold."""
    members, place = [], 0
    for kind in kinds:
        columns = PARTS[kind].columns
        arrays = ", ".join(f"${place + at}::{_type(name)}[]" for at, name in enumerate(columns, 1))
        place += len(columns)
        members.append(PARTS[kind].text.replace("{rows}", f"unnest({arrays}) AS r({', '.join(columns)})"))
    shown = "id, attempt, key_hash FROM held" if "settle" in kinds else "1 WHERE false"
    return f"WITH {', '.join(members)} SELECT {shown}"


def arguments(kind: str, rows: Sequence[Mapping[str, Any]]) -> Iterable[list[Any]]:
    """The arrays of these records, one for each column."""
    for name in PARTS[kind].columns:
        values = [row.get(name) for row in rows]
        yield [None if value is None else orjson.dumps(value) for value in values] if _type(name) == "JSONB" else values


@cache
def _type(name: str) -> str:
    table = Completion.__table__ if name in Completion.__table__.c else Media.__table__
    return OTHER.get(name) or str(table.c[name].type.compile(dialect=postgresql.dialect()))
