"""What a call looks like in the table: the columns of a Completion, and an Answer read back from them.

Pure values; `recorder` writes them and `ledgers` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import orjson

from polar.engines.base import Generation
from polar.errors import SessionError
from polar.messages import Answer, Message, ModelRequest, Sampling
from polar.models import now
from polar.proxy.bodies import Stored
from polar.proxy.flights import Asked
from polar.proxy.ledger import Ids, Node, Place, as_ids
from polar.proxy.pool import EngineLink

MASK = b"[redacted]"
NUL = b"\\u0000"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that is ready to be sampled from."""

    link: EngineLink
    prompt: Ids
    suffix: Ids
    """The end of `prompt` that the parent does not cover."""
    sampling: Sampling
    place: Place
    """Where the call stands, now that its prompt is made."""
    trim: int = 0
    """How many ids at the end of its parent's output `prompt` does not keep."""
    marks: tuple[str, ...] = ()
    """What of the request this engine or model cannot do."""
    flags: tuple[str, ...] = ()
    """What the completion should say of what will come of it."""
    chat: ModelRequest | None = None
    """In canonical mode, what is sent instead of `prompt`."""


def masked(body: bytes, secret: str) -> bytes:
    """A body without the session's key, as it may be stored."""
    return body.replace(secret.encode(), MASK)


def intent(
    asked: Asked, completion_id: str, body: Stored, place: Place, prepared: Prepared | None, body_hash: bytes
) -> dict[str, Any]:
    """The row that says a call is about to be made. Without `prepared`, it got no further than its lane's engine."""
    return {
        "id": completion_id,
        "session_id": asked.caller.id,
        "attempt": asked.caller.attempt,
        "outcome": "asked",
        "parent_id": place.parent.id if place.parent else None,
        "parent_reason": place.reason,
        "dialect": asked.dialect.name,
        "model_requested": asked.request.model.replace("\0", "").replace(asked.secret, MASK.decode()),
        "request": body.blob,
        "role": asked.role.name,
        "parsed": {**described(asked, prepared, place, body_hash), **({"base": body.base} if body.base else {})},
        "context_len": len(asked.request.messages),
        "prompt_len": len(prepared.prompt) if prepared else 0,
        "suffix_ids": prepared.suffix.tobytes() if prepared else b"",
        "flags": list(place.flags),
        "requested_at": now(),
    }


def media(place: Place, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Rows of the pictures that a call brings, and those before it did not."""
    found = {}
    for image in (image for message in messages[place.appended :] for image in message.images):
        if (content := image.content()) is not None:
            media_type, data = content
            found[image.digest()] = {"digest": image.digest(), "media_type": media_type.replace("\0", ""), "data": data}
    return [{**row, "created_at": now()} for row in found.values()]


def pictured(place: Place, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Where the pictures stand that a call brings: of each its message, and the words in its place for a text model."""
    return [
        {"digest": image.digest(), "message": index, "start": image.start, "end": image.end}
        for index, message in enumerate(messages[place.appended :], place.appended)
        for image in message.images
    ]


def described(asked: Asked, prepared: Prepared | None, place: Place, body_hash: bytes) -> dict[str, Any]:
    """The `parsed` column without the answer: what was asked, what was sampled with, and the ledger's hashes."""
    return {
        "asked": _without_key(asked.request.sampling.asked(), asked.secret),
        "sampled_with": _without_key(prepared.sampling.asked(), asked.secret) if prepared else {},
        "history": asked.caller.history,
        "marks": [*asked.request.marks, *(prepared.marks if prepared else ())],
        **({"role_reason": asked.role.reason} if asked.role.reason else {}),
        **({"images": images} if (images := pictured(place, asked.request.messages)) else {}),
        **({"n": asked.request.n} if asked.request.n > 1 else {}),
        "ledger": hashes(prepared, place, body_hash),
    }


def hashes(prepared: Prepared | None, place: Place, body_hash: bytes, node: Node | None = None) -> dict[str, Any]:
    """What the ledger knows a call by; `node`: once it is answered."""
    return {
        "fingerprint": place.fingerprint.hex(),
        "context": place.context_hash.hex(),
        "body": body_hash.hex(),
        **({"served": node.served.hex()} if node else {}),
        **({"head": place.head.hex()} if place.head else {}),
        **({"trim": prepared.trim} if prepared and prepared.trim else {}),
    }


def sampled(generation: Generation | None) -> dict[str, Any]:
    """The columns that the engine's tokens fill."""
    if generation is None:
        return {}
    logprobs = generation.logprobs
    return {
        "output_ids": as_ids(generation.output_ids).tobytes(),
        "logprobs": None if logprobs is None else np.asarray(logprobs, dtype="<f4").tobytes(),
        "finish_reason": generation.finish_reason,
        "policy_versions": generation.policy_versions,
        "prompt_verified": None if generation.prompt_tokens is None else True,
    }


def engine(prepared: Prepared | None, generation: Generation | None, tries: int, ms: int) -> dict[str, Any]:
    """The `engine` column: who answered, and how long it took."""
    values: dict[str, Any] = {"tries": tries, "ms": ms}
    if prepared is not None:
        passport = prepared.link.passport
        values |= {"name": passport.engine, "url": prepared.link.engine.url, "scripted": passport.scripted}
    return values | ({"timings": generation.timings} if generation else {})


def failure(error: SessionError, secret: str) -> dict[str, Any]:
    """The `error` column; an engine's words may repeat what it was sent, key and all."""
    message = error.message.replace("\0", "").replace(secret, MASK.decode())
    return {"blame": error.blame, "code": error.code, "message": message, **error.detail}


def served(message: Message, secret: str) -> dict[str, Any]:
    """An answer's message for the `parsed` column, with the key masked and without what jsonb refuses."""
    value = message.chat_form()
    data = orjson.dumps(value).replace(secret.encode(), MASK)
    if NUL in data:
        data = orjson.dumps(_without_nul(value)).replace(secret.encode(), MASK)
    clean: dict[str, Any] = orjson.loads(data)
    return clean


def told(answer: Answer, secret: str) -> dict[str, Any]:
    """What the harness was told beside the message and its tokens, for the `parsed` column."""
    names = ("stop_sequence", "cached_tokens", "reasoning_tokens")
    return {name: _without_key(getattr(answer, name), secret) for name in names}


def answer_of(row: Any, completion_id: str, model: str, prompt_tokens: int) -> Answer:
    """A recorded answer, to be given again."""
    message = Message.from_chat_form(row.parsed["message"])
    finished: datetime = row.finished_at
    return Answer(
        id=completion_id,
        model=model,
        message=message,
        finish_reason="tool_calls" if message.tool_calls and row.finish_reason == "stop" else row.finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(as_ids(row.output_ids)),
        created=int(finished.timestamp()),
        **row.parsed.get("told", {}),
    )


def _without_key(value: Any, secret: str) -> Any:
    if isinstance(value, str):
        return value.replace(secret, MASK.decode())
    if isinstance(value, (list, tuple)):
        return [_without_key(item, secret) for item in value]
    if isinstance(value, dict):
        return {_without_key(key, secret): _without_key(item, secret) for key, item in value.items()}
    return value


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, list):
        return [_without_nul(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nul(item) for key, item in value.items()}
    return value
