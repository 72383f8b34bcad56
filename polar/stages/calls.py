"""Recorded completions as builders read them: rows become Calls, prompts are put together again.

The inverse of what the proxy's recorder writes. Decides nothing about traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import zstandard
from sqlalchemy import select
from sqlalchemy.orm import Session

from polar.builders.base import Call, Ids
from polar.dialects import DIALECTS
from polar.dialects.base import BadRequest, Dialect
from polar.models import Completion
from polar.registry import load


def load_calls(db: Session, session_id: str, attempt: int) -> list[Call]:
    """The calls of one attempt, in the order in which they were requested."""
    rows = db.scalars(
        select(Completion)
        .where(Completion.session_id == session_id, Completion.attempt == attempt)
        .order_by(Completion.seq)
    ).all()
    return to_calls(rows)


def to_calls(rows: Sequence[Completion]) -> list[Call]:
    """Rows in order of request; a parent stands before its children."""
    prompts: dict[str, Ids] = {}
    outputs: dict[str, Ids] = {}
    calls = []
    for row in rows:
        suffix = np.frombuffer(row.suffix_ids, np.int32)
        if row.parent_id in prompts:
            suffix = np.concatenate([prompts[row.parent_id], outputs[row.parent_id], suffix])
        prompts[row.id] = suffix
        outputs[row.id] = np.frombuffer(row.output_ids, np.int32)
        calls.append(
            Call(
                id=row.id,
                parent_id=row.parent_id,
                parent_reason=row.parent_reason,
                prompt_ids=suffix,
                output_ids=outputs[row.id],
                logprobs=None if row.logprobs is None else np.frombuffer(row.logprobs, np.float32),
                request=_chat_request(row),
                answer=row.parsed.get("message") or {"role": "assistant", "content": ""},
                finish_reason=row.finish_reason,
                outcome=row.outcome,
                role=row.role,
                prompt_verified=row.prompt_verified,
                delivered=row.delivered,
                flags=tuple(row.flags),
                policy_versions=tuple(row.policy_versions),
                model_requested=row.model_requested,
                model_used=row.model_used or "",
                metadata=_metadata(row),
            )
        )
    return calls


def _metadata(row: Completion) -> dict[str, Any]:
    reason = row.parsed.get("role_reason")
    marks = row.parsed.get("marks")
    return {
        "dialect": row.dialect,
        "requested_at": row.requested_at.timestamp(),
        **({"role_reason": reason} if reason else {}),
        **({"marks": marks} if marks else {}),
    }


def _chat_request(row: Completion) -> dict[str, Any]:
    body = orjson.loads(zstandard.decompress(row.request))
    dialect = load("dialect", DIALECTS, row.dialect, Dialect)()  # type: ignore[type-abstract]
    try:
        request = dialect.parse(body, {"model": row.model_requested})
    except BadRequest:
        # Recorded because it was asked, refused because of what it asked: it has no messages to show.
        return {"messages": [], "tools": None}
    tools = [{"type": "function", "function": tool.raw} for tool in request.tools]
    return {"messages": [each.chat_form() for each in request.messages], "tools": tools or None}
