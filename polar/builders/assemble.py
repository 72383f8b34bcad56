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
    calls: Sequence[Call],
    trained: Sequence[bool],
    flags: Iterable[str],
    difference: dict[str, Any] | None = None,
    trims: Sequence[int] = (),
) -> Trace:
    """The trace of `calls`, root first; `trained` says whose sampled tokens carry the mask, `trims` how many at the
    end of each one's output the next one does not keep."""
    first, last = calls[0], calls[-1]
    prompt = len(first.prompt_ids)
    each = zip(calls, trained, trims or [0] * len(calls), strict=True)
    pieces = [Piece(call, len(call.prompt_ids) - prompt, train, trim) for call, train, trim in each]
    response_ids = np.concatenate([last.prompt_ids[prompt:], last.output_ids]).astype(np.int32, copy=False)
    loss_mask = np.zeros(len(response_ids), np.uint8)
    for piece in pieces:
        if piece.trained:
            loss_mask[piece.start : piece.end] = 1
    messages, lines_up = _response_messages(calls)
    found = set(flags)
    if not lines_up:
        found.add("messages_differ")
    if any(other_tools(before, after) for before, after in pairwise(calls)):
        found.add("tools_changed")
    return Trace(
        prompt_ids=first.prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        logprobs=aligned_logprobs(pieces, len(response_ids)),
        prompt_messages=list(first.request.get("messages") or []),
        response_messages=messages,
        tools=first.request.get("tools") or None,
        finish_reason=last.finish_reason,
        certificate=certify(pieces, found, difference),
        completion_ids=[call.id for call in calls],
        metadata=describe(pieces),
    )


def aligned_logprobs(pieces: Sequence[Piece], length: int) -> Floats | None:
    """The trained tokens' log-probabilities at their places, zero elsewhere; None if any has none."""
    logprobs = np.zeros(length, np.float32)
    for piece in pieces:
        if not piece.trained:
            continue
        values = usable_logprobs(piece.call)
        if values is None:
            return None
        logprobs[piece.start : piece.end] = values[: piece.length]
    return logprobs


def other_tools(before: Call, after: Call) -> bool:
    """Whether two calls of one conversation were offered different tools."""
    if before.head is not None and after.head is not None:
        return before.head != after.head
    return bool(before.request.get("tools") != after.request.get("tools"))


def _response_messages(calls: Sequence[Call]) -> tuple[list[dict[str, Any]], bool]:
    """Served answers and what the harness appended to each, in order; and whether the two line up.

    The harness's echo of an answer is left out: the answer as it was served says what was sampled. The last
    request holds all earlier ones, since each continues the one before it; so it alone is read."""
    messages, lines_up = [calls[0].answer], True
    for before, after in pairwise(calls):
        appended, echoed = appended_messages(before, after, calls[-1])
        messages += [*appended, after.answer]
        lines_up &= echoed
    return messages, lines_up


def appended_messages(before: Call, after: Call, last: Call) -> tuple[list[dict[str, Any]], bool]:
    """What the harness appended to an answer, read from a later request; and whether it repeated the answer."""
    appended = list(last.request.get("messages") or [])[before.messages() : after.messages()]
    if not appended or appended[0].get("role") != "assistant":
        return appended, False
    return appended[1:], True


def describe(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The first completion's own, as the original has it, whose part this is, and a line for each completion.

    A path may begin with completions of its parent agent; whose it is says its end."""
    first, last = pieces[0].call, pieces[-1].call
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
            "end": piece.end,
        }
        for piece in pieces
    ]
    part = {"role": last.role, "spawned_by": last.metadata.get("spawned_by")}
    own = {"model_requested": first.model_requested, "model_used": first.model_used}
    return {**first.metadata, **own, **part, "completion_metadata": lines}
