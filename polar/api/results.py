"""The results feed over REST: pages of ended sessions as JSON, as JSON lines or as Arrow, and cursors of consumers.

Which sessions, and in what order, is `delivery.feed`'s affair. A page is written while it is read, a few sessions
at a time, so it costs the same memory whatever its length. One that breaks off is not ended properly, which every HTTP
client notices; it is asked for again from the last cursor that came whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import orjson
from flask import Blueprint, Response, current_app, jsonify, request
from pydantic import Field, ValidationError

from polar.api import arrow, wire
from polar.api.problems import problem
from polar.api.tasks import MAX_WAIT_SECONDS, POLL_SECONDS, json_body, number, view_is_full
from polar.delivery import feed
from polar.errors import SpecError
from polar.spec import Spec, TaskId, validation_errors

blueprint = Blueprint("results", __name__)
JSON = "application/json"
LINES = "application/x-ndjson"
MAX_LIMIT = 1000
MAX_CURSOR_DIGITS = 18
CursorText = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
CursorNumber = Annotated[int, Field(strict=True, ge=0, lt=10**MAX_CURSOR_DIGITS)]


class AckRequest(Spec):
    """How far a consumer has got."""

    consumer: TaskId
    cursor: CursorText | CursorNumber
    rewind: bool = False
    """Take this cursor even if it is an earlier one."""


class _Named(Spec):
    """A consumer's name in a query."""

    consumer: TaskId


@blueprint.get("/rollout/results")
def results() -> Response:
    """Ended sessions after a cursor, in the order of the feed; `wait=30` answers when there is one or time is up."""
    full, limit = view_is_full(), int(number("limit", 100, low=1, high=MAX_LIMIT))
    end = time.monotonic() + min(number("wait", 0.0, low=0.0), MAX_WAIT_SECONDS)
    accepted = _format()
    if accepted is None:
        return _not_acceptable()
    database = current_app.config["DATABASE"]
    group, task_id = request.args.get("group"), request.args.get("task_id")
    after = _after()
    while True:
        page = feed.page(database, after, limit, group=group, task_id=task_id)
        if page.places or time.monotonic() >= end:
            break
        after = page.next  # what was looked at once need not be looked at again
        time.sleep(POLL_SECONDS)
    ended = feed.load(database, page.places)
    body: Iterator[bytes]
    if accepted == arrow.MEDIA_TYPE:
        body = arrow.stream(ended, full=full)
    elif accepted == LINES:
        body = (_result(each, full) + b"\n" for some in ended for each in some)
    else:
        body = _object(ended, page.next, full)
    headers = {"X-Polar-Next": str(page.next), "Cache-Control": "no-store"}
    return Response(body, mimetype=accepted, headers=headers)


@blueprint.post("/rollout/results/ack")
def acknowledge() -> Response:
    """Move a consumer's cursor; acknowledging an earlier one again changes nothing."""
    asked: AckRequest = _validated(AckRequest, json_body())
    database = current_app.config["DATABASE"]
    cursor = feed.acknowledge(database, asked.consumer, int(asked.cursor), rewind=asked.rewind)
    return jsonify({"consumer": asked.consumer, "cursor": str(cursor)})


def _after() -> int:
    """Where to begin: the cursor that is named, `end` for now, or the consumer's own, or the beginning."""
    consumer, raw = request.args.get("consumer"), request.args.get("after")
    if consumer is not None:
        _validated(_Named, {"consumer": consumer})
    if raw == "end":
        return feed.end(current_app.config["DATABASE"])
    if raw is not None:
        if not (raw.isascii() and raw.isdecimal() and len(raw) <= MAX_CURSOR_DIGITS):
            raise SpecError.at("after", f"{raw!r} is no cursor; take `next` of the page before")
        return int(raw)
    return feed.cursor_of(current_app.config["DATABASE"], consumer) if consumer is not None else 0


def _format() -> str | None:
    offered = [JSON, LINES, *([arrow.MEDIA_TYPE] if arrow.available() else [])]
    return request.accept_mimetypes.best_match(offered) if request.accept_mimetypes else JSON


def _not_acceptable() -> Response:
    if arrow.MEDIA_TYPE in request.accept_mimetypes and not arrow.available():
        detail = "Arrow needs pyarrow beside the API: pip install 'polar-rollout[arrow]'"
        return problem(406, "arrow_not_installed", detail)
    return problem(406, "not_acceptable", f"results come as {JSON}, {LINES} or {arrow.MEDIA_TYPE}")


def _object(ended: Iterator[list[feed.Ended]], following: int, full: bool) -> Iterator[bytes]:
    yield b'{"results":['
    comma = b""
    for some in ended:
        for each in some:
            yield comma + _result(each, full)
            comma = b","
    yield b'],"next":"%d"}' % following


def _result(ended: feed.Ended, full: bool) -> bytes:
    """SessionResult, and the cursor of a reader that has it."""
    result = wire.session_result(ended.session, ended.task, ended.trajectory, full=full)
    return orjson.dumps({**result, "cursor": str(ended.number)})


def _validated(model: type[Spec], body: Any) -> Any:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = validation_errors(error)
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors[:5]), errors=errors) from None
