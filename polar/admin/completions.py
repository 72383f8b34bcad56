"""One model call: as the harness asked, as the engine was asked, as it answered, and what it adds to its parent."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from flask import Response
from sqlalchemy.orm import Session

from polar import queries, slices
from polar.admin.decoding import texts_for, whole_text
from polar.admin.page import blueprint, chosen, database, page
from polar.admin.words import pretty, text_of
from polar.api.sessions import media as served_media
from polar.bodies import request_of, unpack
from polar.errors import NotFoundError
from polar.models import Completion, RolloutSession
from polar.slices import Conversation

VIEWS = ("difference", "asked", "sent", "answered")
MOST_TOKENS = 4000
"""Of a prompt's new end, as text."""
MOST_LINES = 2000
"""Of a message, compared line by line."""
MOST_CHARACTERS = 200_000
"""Of a body, on a page; all of it is a link away."""


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one message since the parent's request."""

    kind: str
    """same, added, removed or changed."""
    message: dict[str, Any]
    lines: list[str]
    """Of a changed one: the difference, line by line."""


@blueprint.get("/completions/<completion_id>")
@page("admin/completion.html")
def completion(completion_id: str) -> dict[str, Any]:
    """The page; the view that is not asked for is not read."""
    view = chosen("view", VIEWS, "difference")
    with database() as db:
        row = _found(db, completion_id)
        session = queries.session(db, row.session_id)
        values = {"row": row, "session": session, "task": session.task, "view": view, "views": VIEWS}
        if view == "difference":
            return values | _difference(db, row)
        if view == "asked":
            body = request_of(db, row.id)
            text = pretty(orjson.loads(body))
            return values | {"text": text[:MOST_CHARACTERS], "cut": len(text) > MOST_CHARACTERS, "size": len(body)}
        if view == "sent":
            return values | _sent(db, row, session)
        text = pretty(orjson.loads(unpack(row.answer))) if row.answer else ""
        return values | {"text": text[:MOST_CHARACTERS], "cut": len(text) > MOST_CHARACTERS, "parsed": row.parsed}


def _found(db: Session, completion_id: str) -> Completion:
    row = db.get(Completion, completion_id)
    if row is None:
        raise NotFoundError(f"no completion {completion_id!r}")
    return row


def _sent(db: Session, row: Completion, session: RolloutSession) -> dict[str, Any]:
    """The end of the prompt that is new, and the output, as ids and text."""
    texts = texts_for(db, session.lane)
    suffix = np.frombuffer(row.suffix_ids, np.int32)[-MOST_TOKENS:].tolist()
    output = np.frombuffer(row.output_ids, np.int32)[:MOST_TOKENS].tolist()
    return {
        "suffix": suffix,
        "suffix_tokens": len(row.suffix_ids) // 4,
        "output": output,
        "output_tokens": len(row.output_ids) // 4,
        "before": row.prompt_len - len(row.suffix_ids) // 4,
        "suffix_text": whole_text(texts, suffix) if texts else None,
        "output_text": whole_text(texts, output) if texts else None,
    }


def _difference(db: Session, row: Completion) -> dict[str, Any]:
    """The request's messages against its parent's request and answer."""
    said = slices.conversation(row, request_of(db, row.id))
    parent = db.get(Completion, row.parent_id) if row.parent_id else None
    before: list[dict[str, Any]] = []
    if parent is not None:
        earlier = slices.conversation(parent, request_of(db, parent.id))
        before = [*earlier.messages, *([earlier.answer] if earlier.answer else [])]
    changes = compared(before, said.messages)
    kept = next((n for n, change in enumerate(changes) if change.kind != "same"), len(changes))
    return {
        "parent": parent,
        "said": said,
        "kept": kept,
        "changes": changes[kept:],
        "new_tools": parent is not None and _tools(db, parent) != said.tools,
    }


def _tools(db: Session, parent: Completion) -> list[dict[str, Any]]:
    return slices.conversation(parent, request_of(db, parent.id)).tools


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Change]:
    """Message by message; where one stands in for another, line by line."""
    keys = [[orjson.dumps(_plain(each), option=orjson.OPT_SORT_KEYS) for each in side] for side in (before, after)]
    head = 0
    while head < min(len(keys[0]), len(keys[1])) and keys[0][head] == keys[1][head]:
        head += 1
    found = [Change("same", message, []) for message in after[:head]]
    matcher = difflib.SequenceMatcher(None, keys[0][head:], keys[1][head:], autojunk=False)
    for tag, low, high, first, last in matcher.get_opcodes():
        old, new = before[head + low : head + high], after[head + first : head + last]
        if tag == "equal":
            found += [Change("same", message, []) for message in new]
            continue
        pairs = min(len(old), len(new))
        found += [Change("changed", b, lines_between(a, b)) for a, b in zip(old, new, strict=False)]
        found += [Change("removed", message, []) for message in old[pairs:]]
        found += [Change("added", message, []) for message in new[pairs:]]
    return found


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it is compared: an empty text and none are the same."""
    return {name: value for name, value in message.items() if value not in (None, "", [])}


def lines_between(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A message against another, as a unified difference without its head."""
    sides = [_lines(old), _lines(new)]
    return list(difflib.unified_diff(sides[0], sides[1], lineterm="", n=2))[2:]


def _lines(message: dict[str, Any]) -> list[str]:
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    text = f"role: {message.get('role')}\n{text_of(message.get('content'))}" + (f"\n{pretty(rest)}" if rest else "")
    return text.splitlines()[:MOST_LINES]


@blueprint.get("/completions/<completion_id>/raw/<part>")
def raw(completion_id: str, part: str) -> Response:
    """A body whole, as it was recorded: what no page shows for its size."""
    with database() as db:
        row = _found(db, completion_id)
        if part == "asked.json":
            return _download(request_of(db, row.id), f"{row.id}.asked.json", "application/json")
        if part == "answered.json" and row.answer:
            return _download(unpack(row.answer), f"{row.id}.answered.json", "application/json")
        if part == "prompt.txt":
            session = queries.session(db, row.session_id)
            texts, ids = texts_for(db, session.lane), slices.prompt_of(db, row.id).tolist()
            text = whole_text(texts, ids) if texts else " ".join(map(str, ids))
            return _download(text.encode(), f"{row.id}.prompt.txt", "text/plain")
        if part.startswith("message-") and part.removeprefix("message-").isdecimal():
            return _message(slices.conversation(row, request_of(db, row.id)), row, int(part.removeprefix("message-")))
    raise NotFoundError(f"completion {completion_id} has no part {part!r}")


def _message(said: Conversation, row: Completion, number: int) -> Response:
    messages = [*said.messages, *([said.answer] if said.answer else [])]
    if number >= len(messages):
        raise NotFoundError(f"this conversation has {len(messages)} messages")
    return _download(text_of(messages[number].get("content")).encode(), f"{row.id}.{number}.txt", "text/plain")


def _download(data: bytes, name: str, kind: str) -> Response:
    # As a file: what an agent wrote is never a page of ours.
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Security-Policy": "sandbox"}
    return Response(data, mimetype=kind, headers=headers)


@blueprint.get("/media/<digest>")
def media(digest: str) -> Response:
    """A picture that a harness sent, as the REST API serves it."""
    return served_media(digest)
