"""Parts of what is large: a stretch of a trace's tokens, a session's calls without their bodies, one call with its own.

Cuts are made by Postgres, so that a page of a session of 200,000 tokens reads a page. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray
from sqlalchemy import Row, func, literal, select
from sqlalchemy.orm import Session

from polar.dialects import DIALECTS
from polar.dialects.base import BadRequest, Dialect
from polar.models import Completion, TraceRow
from polar.registry import load

MAX_CALLS = 2000
"""Of a session, shown at once."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some of a trace's tokens, in the order of its stream: prompt, then response."""

    start: int
    prompt_tokens: int
    """Of the whole trace."""
    response_tokens: int
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32] | None
    """NaN where the prompt is."""


def stretch(db: Session, session_id: str, number: int, start: int, count: int) -> Stretch:
    """`count` tokens of a trace from `start` on; fewer at its end. Raises NoResultFound."""
    where = (TraceRow.session_id == session_id, TraceRow.number == number)
    prompt, response = (
        int(length)
        for length in db.execute(
            select(func.length(TraceRow.prompt_ids) // 4, func.length(TraceRow.response_ids) // 4).where(*where)
        ).one()
    )
    start = min(max(start, 0), max(prompt + response - 1, 0))
    end = min(start + count, prompt + response)
    first, last = max(start - prompt, 0), max(end - prompt, 0)
    of_prompt = func.substring(TraceRow.prompt_ids, 4 * min(start, prompt) + 1, 4 * max(min(end, prompt) - start, 0))
    row = db.execute(
        select(
            of_prompt,
            func.substring(TraceRow.response_ids, 4 * first + 1, 4 * (last - first)),
            func.substring(TraceRow.loss_mask, first + 1, last - first),
            func.substring(TraceRow.logprobs, 4 * first + 1, 4 * (last - first)),
        ).where(*where)
    ).one()
    ids = np.frombuffer(row[0] + row[1], np.int32)
    unmasked = len(row[0]) // 4
    mask = np.concatenate([np.zeros(unmasked, np.uint8), np.frombuffer(row[2], np.uint8)])
    logprobs = None
    if row[3] is not None:
        logprobs = np.concatenate([np.full(unmasked, np.nan, np.float32), np.frombuffer(row[3], np.float32)])
    return Stretch(start, prompt, response, ids, mask, logprobs)


def mask_of(db: Session, session_id: str, number: int) -> NDArray[np.uint8]:
    """A trace's whole mask: a byte a token, for the strip that shows where one is."""
    data = db.scalar(select(TraceRow.loss_mask).where(TraceRow.session_id == session_id, TraceRow.number == number))
    return np.frombuffer(data or b"", np.uint8)


def body_of(db: Session, session_id: str, number: int) -> dict[str, Any]:
    """A trace's messages and metadata. Raises NoResultFound."""
    data = db.execute(
        select(TraceRow.body).where(TraceRow.session_id == session_id, TraceRow.number == number)
    ).scalar_one()
    body: dict[str, Any] = orjson.loads(zstandard.decompress(data))
    return body


CALL_COLUMNS = (
    Completion.id,
    Completion.seq,
    Completion.attempt,
    Completion.outcome,
    Completion.parent_id,
    Completion.parent_reason,
    Completion.role,
    Completion.dialect,
    Completion.finish_reason,
    Completion.context_len,
    Completion.prompt_len,
    (func.length(Completion.output_ids) // 4).label("output_tokens"),
    Completion.flags,
    Completion.error,
    Completion.delivered,
    Completion.requested_at,
    Completion.finished_at,
    Completion.parsed["role_reason"].astext.label("role_reason"),
    Completion.engine["ms"].as_integer().label("engine_ms"),
)


def calls_of(db: Session, session_id: str, limit: int = MAX_CALLS) -> Sequence[Row[Any]]:
    """A session's completions without bodies and tokens, in the order in which they were requested."""
    query = select(*CALL_COLUMNS).where(Completion.session_id == session_id)
    return db.execute(query.order_by(Completion.seq).limit(limit)).all()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a call was asked, in the OpenAI Chat form, and what it answered."""

    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None
    tools: list[dict[str, Any]]


def conversation(row: Completion, body: bytes) -> Conversation:
    """A call's messages. A request that its dialect refuses has none."""
    dialect = load("dialect", DIALECTS, row.dialect, Dialect)()  # type: ignore[type-abstract]
    answer = row.parsed.get("message")
    try:
        request = dialect.parse(orjson.loads(body), {"model": row.model_requested})
    except BadRequest:
        return Conversation([], answer, [])
    return Conversation([each.chat_form() for each in request.messages], answer, [tool.raw for tool in request.tools])


def prompt_of(db: Session, completion_id: str) -> NDArray[np.int32]:
    """The whole prompt of a call, put together from those before it in one query."""
    above = (
        select(
            Completion.id,
            Completion.parent_id,
            Completion.suffix_ids,
            literal(b"").label("output_ids"),
            Completion.parsed["ledger"]["trim"].as_integer().label("trim"),
            literal(0).label("depth"),
        )
        .where(Completion.id == completion_id)
        .cte("above", recursive=True)
    )
    above = above.union_all(
        select(
            Completion.id,
            Completion.parent_id,
            Completion.suffix_ids,
            Completion.output_ids,
            Completion.parsed["ledger"]["trim"].as_integer(),
            above.c.depth + 1,
        ).where(Completion.id == above.c.parent_id)
    )
    stream = np.zeros(0, np.int32)
    for row in db.execute(select(above).order_by(above.c.depth.desc())):
        kept = stream[: len(stream) - (row.trim or 0)]
        own = (np.frombuffer(row.suffix_ids, np.int32), np.frombuffer(row.output_ids, np.int32))
        stream = np.concatenate([kept, *own])
    return stream
