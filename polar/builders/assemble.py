"""Completions that continue each other become one trace: its tokens, its messages, its certificate.

That they do continue each other is asserted in links.py, so the last prompt and output are the whole stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from polar.builders.base import Call, Floats, Trace
from polar.builders.certificate import Piece, certify, usable_logprobs


def assemble(
    calls: Sequence[Call], trained: Sequence[bool], flags: Iterable[str], difference: dict[str, Any] | None = None
) -> Trace:
    """The trace of `calls`, root first; `trained` says whose sampled tokens carry the mask."""
    first, last = calls[0], calls[-1]
    prompt = len(first.prompt_ids)
    pieces = [Piece(call, len(call.prompt_ids) - prompt, train) for call, train in zip(calls, trained, strict=True)]
    response_ids = np.concatenate([last.prompt_ids[prompt:], last.output_ids]).astype(np.int32, copy=False)
    loss_mask = np.zeros(len(response_ids), np.uint8)
    for piece in pieces:
        if piece.trained:
            loss_mask[piece.start : piece.start + len(piece.call.output_ids)] = 1
    messages, lines_up = _response_messages(calls)
    found = set(flags)
    if not lines_up:
        found.add("messages_differ")
    if any(before.request.get("tools") != after.request.get("tools") for before, after in pairwise(calls)):
        found.add("tools_changed")
    return Trace(
        prompt_ids=first.prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        logprobs=_logprobs(pieces, len(response_ids)),
        prompt_messages=list(first.request.get("messages") or []),
        response_messages=messages,
        tools=first.request.get("tools") or None,
        finish_reason=last.finish_reason,
        certificate=certify(pieces, found, difference),
        completion_ids=[call.id for call in calls],
        metadata=_metadata(pieces),
    )


def _logprobs(pieces: Sequence[Piece], length: int) -> Floats | None:
    logprobs = np.zeros(length, np.float32)
    for piece in pieces:
        if not piece.trained:
            continue
        values = usable_logprobs(piece.call)
        if values is None:
            return None
        logprobs[piece.start : piece.start + len(values)] = values
    return logprobs


def _response_messages(calls: Sequence[Call]) -> tuple[list[dict[str, Any]], bool]:
    """Served answers and what the harness appended to each, in order; and whether the two line up.

    The harness's echo of an answer is left out: the answer as it was served says what was sampled."""
    messages, lines_up = [calls[0].answer], True
    for before, after in pairwise(calls):
        appended = (after.request.get("messages") or [])[len(before.request.get("messages") or []) :]
        if appended and appended[0].get("role") == "assistant":
            appended = appended[1:]
        else:
            lines_up = False
        messages += [*appended, after.answer]
    return messages, lines_up


def _metadata(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The first completion's own, as the original has it, and a line for each completion."""
    first = pieces[0].call
    lines = [
        {
            **piece.call.metadata,
            "completion_id": piece.call.id,
            "parent_id": piece.call.parent_id,
            "parent_reason": piece.call.parent_reason,
            "finish_reason": piece.call.finish_reason,
            "outcome": piece.call.outcome,
            "role": piece.call.role,
            "delivered": piece.call.delivered,
            "trained": piece.trained,
            "start": piece.start,
            "end": piece.start + len(piece.call.output_ids),
        }
        for piece in pieces
    ]
    own = {"model_requested": first.model_requested, "model_used": first.model_used}
    return {**first.metadata, **own, "completion_metadata": lines}
