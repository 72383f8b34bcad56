"""Recorded completions as builders read them: rows become Calls, prompts are put together again.

The inverse of what the proxy's recorder writes. Decides nothing about traces. A session of many turns repeats its
history in every request and every prompt; here each token stands once in memory, and a request is read only when
somebody looks at its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import orjson
from sqlalchemy import select
from sqlalchemy.orm import Session

from polar.bodies import base_of, joined
from polar.builders.base import Call, Ids
from polar.dialects import DIALECTS
from polar.dialects.base import BadRequest, Dialect
from polar.models import Completion
from polar.registry import load

NONE: Ids = np.zeros(0, np.int32)


class Request(Mapping[str, Any]):
    """A request in the OpenAI Chat form, parsed when it is first looked at."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    @cached_property
    def _value(self) -> dict[str, Any]:
        return self._read()

    def __getitem__(self, key: str) -> Any:
        return self._value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)


@dataclass(frozen=True, slots=True)
class Bodies:
    """The request bodies of a session as they are stored."""

    blobs: dict[str, tuple[bytes, str | None]]
    """By completion, what is stored and the completion to whose body it is the difference."""

    def body_of(self, completion_id: str) -> bytes:
        """One body, put together from as many as it takes."""
        chain: list[bytes] = []
        wanted: str | None = completion_id
        while wanted is not None:
            blob, wanted = self.blobs[wanted]
            chain.append(blob)
        return joined(chain)


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
    bodies = Bodies({row.id: (row.request, base_of(row)) for row in rows})
    return [_call(row, ids, bodies) for row, ids in zip(rows, _token_ids(rows), strict=True)]


def _call(row: Completion, ids: tuple[Ids, Ids], bodies: Bodies) -> Call:
    hashes = row.parsed.get("ledger") or {}
    return Call(
        id=row.id,
        parent_id=row.parent_id,
        parent_reason=row.parent_reason,
        prompt_ids=ids[0],
        output_ids=ids[1],
        logprobs=None if row.logprobs is None else np.frombuffer(row.logprobs, np.float32),
        request=Request(partial(_chat_request, row.dialect, row.model_requested, partial(bodies.body_of, row.id))),
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
        context_len=row.context_len,
        head=hashes.get("fingerprint"),
        trim=_trim(row),
    )


def _token_ids(rows: Sequence[Completion]) -> list[tuple[Ids, Ids]]:
    """Prompt and output of each row.

    A conversation is one array that its calls are views of: a branch has the array of its longest continuation, and
    each other branch a copy of what comes before it. So 300 turns cost as much memory as the last of them."""
    suffixes = {row.id: np.frombuffer(row.suffix_ids, np.int32) for row in rows}
    outputs = {row.id: np.frombuffer(row.output_ids, np.int32) for row in rows}
    starts, ends = _spans(rows, suffixes, outputs)
    longest, heirs = dict(ends), {}
    for row in reversed(rows):
        parent = row.parent_id
        if row.id in ends and parent in ends and longest[row.id] > longest[parent] and not _trim(row):
            longest[parent], heirs[parent] = longest[row.id], row.id
    streams: dict[str, Ids] = {}
    found: list[tuple[Ids, Ids]] = []
    for row in rows:
        if row.id not in ends:
            found.append((NONE, outputs[row.id]))
            continue
        start, end = starts[row.id], ends[row.id]
        if row.parent_id is not None and heirs.get(row.parent_id) == row.id:
            stream = streams[row.parent_id]
        else:
            stream = np.empty(longest[row.id], np.int32)
            if row.parent_id is not None:
                stream[:start] = streams[row.parent_id][:start]
        streams[row.id] = stream
        prompt_end = start + len(suffixes[row.id])
        stream[start:prompt_end], stream[prompt_end:end] = suffixes[row.id], outputs[row.id]
        found.append((stream[:prompt_end], stream[prompt_end:end]))
    for ids in (each for pair in found for each in pair):
        ids.flags.writeable = False
    return found


def _spans(
    rows: Sequence[Completion], suffixes: dict[str, Ids], outputs: dict[str, Ids]
) -> tuple[dict[str, int], dict[str, int]]:
    """Where each row's own tokens begin and end in its conversation.

    A row is left out if its prompt is not known: its parent is not among the rows, or the two do not add up to the
    number of ids that was sent. Its trace then says that it lacks a prompt."""
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for row in rows:
        before = 0 if row.parent_id is None else ends.get(row.parent_id)
        start = None if before is None else before - _trim(row)
        if start is not None and start + len(suffixes[row.id]) == row.prompt_len:
            starts[row.id] = start
            ends[row.id] = row.prompt_len + len(outputs[row.id])
    return starts, ends


def _trim(row: Completion) -> int:
    """How many ids at the end of its parent's output its prompt does not keep."""
    return int((row.parsed.get("ledger") or {}).get("trim", 0))


def _metadata(row: Completion) -> dict[str, Any]:
    told = {name: row.parsed.get(name) for name in ("role_reason", "marks", "sampled_with", "history", "n")}
    return {
        "dialect": row.dialect,
        "requested_at": row.requested_at.timestamp(),
        **{name: value for name, value in told.items() if value},
    }


def _chat_request(dialect_name: str, model: str, body_of: Callable[[], bytes]) -> dict[str, Any]:
    body = orjson.loads(body_of())
    dialect = load("dialect", DIALECTS, dialect_name, Dialect)()  # type: ignore[type-abstract]
    try:
        request = dialect.parse(body, {"model": model})
    except BadRequest:
        # Recorded because it was asked, refused because of what it asked: it has no messages to show.
        return {"messages": [], "tools": None}
    tools = [{"type": "function", "function": tool.raw} for tool in request.tools]
    return {"messages": [each.chat_form() for each in request.messages], "tools": tools or None}
