"""What each route of the REST API takes: the parts that a route's own lines do not show to a program.

`openapi` makes the document from this, from the routes' sentences and from the typed bodies; a test compares the names
here with those that the routes read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polar.api.policy import PolicyRequest
from polar.api.recorder import RecorderRequest
from polar.api.results import AckRequest
from polar.api.weights import PushRequest
from polar.spec import Spec, TaskRequest

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
SECONDS: Schema = {"type": "number", "minimum": 0}


def count(most: int, default: int | None = None) -> Schema:
    """A whole number from 1 on."""
    return {"type": "integer", "minimum": 1, "maximum": most} | ({} if default is None else {"default": default})


@dataclass(frozen=True)
class Described:
    """One operation."""

    query: dict[str, tuple[Schema, str]] = field(default_factory=dict)
    """Query parameters: schema and sentence."""
    headers: dict[str, str] = field(default_factory=dict)
    body: type[Spec] | None = None
    body_required: bool = True
    media_types: tuple[str, ...] = ("application/json",)
    """Of the answer."""
    errors: tuple[int, ...] = ()
    """Beside 401, 403 and 500, which any operation may answer."""


VIEW = ({"type": "string", "enum": ["full", "summary"], "default": "full"}, "`summary` leaves token arrays out.")
WAIT = ({**SECONDS, "maximum": 60, "default": 0}, "Seconds to wait for news before answering with what there is.")
AFTER = ({"type": "integer"}, "`next` of the page before.")

OPERATIONS: dict[str, Described] = {
    "tasks.submit": Described(
        body=TaskRequest,
        headers={"Idempotency-Key": "A submit that is sent again with the same key makes no second task."},
        errors=(409, 422, 429),
    ),
    "tasks.get_task": Described(query={"view": VIEW, "wait": WAIT}, errors=(404, 422)),
    "tasks.cancel_task": Described(
        query={
            "register_if_missing": (
                {"type": "string", "enum": ["true", "false"], "default": "false"},
                "`true`: a task that has not come yet is cancelled before its submit, which is then refused.",
            )
        },
        errors=(404, 422),
    ),
    "tasks.status": Described(),
    "tasks.list_tasks": Described(
        query={
            "status": (TEXT, "Only tasks that are so: running, completed, failed or cancelled."),
            "harness": (TEXT, "Only tasks of this harness."),
            "since": ({"type": "number"}, "Only tasks made since; seconds since 1970."),
            "limit": (count(1000, 200), "At most so many."),
        },
        errors=(422,),
    ),
    "tasks.list_sessions": Described(
        query={"after": AFTER, "limit": (count(20_000), "At most so many; all, if not given.")}, errors=(404, 422)
    ),
    "results.results": Described(
        query={
            "after": (TEXT, "Begin after this cursor; `end`: after what there is now."),
            "consumer": (TEXT, "Begin where this consumer has acknowledged; `after` wins."),
            "limit": (count(1000, 100), "At most so many."),
            "group": (TEXT, "Only sessions of tasks with this `metadata.group_id`."),
            "task_id": (TEXT, "Only sessions of this task."),
            "view": VIEW,
            "wait": WAIT,
        },
        media_types=("application/json", "application/x-ndjson", "application/vnd.apache.arrow.stream"),
        errors=(406, 422),
    ),
    "results.acknowledge": Described(body=AckRequest, errors=(409, 422)),
    "sessions.get_session": Described(errors=(404,)),
    "sessions.cancel_session": Described(errors=(404,)),
    "sessions.events": Described(errors=(404,)),
    "sessions.trajectory": Described(errors=(404,)),
    "sessions.completions": Described(
        query={"after": AFTER, "limit": (count(200, 50), "At most so many.")}, errors=(404, 422)
    ),
    "sessions.media": Described(media_types=("application/octet-stream",), errors=(404,)),
    "recorder.open_session": Described(body=RecorderRequest, body_required=False, errors=(409, 422, 429, 503)),
    "recorder.get_session": Described(errors=(404,)),
    "recorder.close_session": Described(errors=(404,)),
    "recorder.drop_session": Described(errors=(404,)),
    "recorder.list_sessions": Described(
        query={
            "task_id": (TEXT, "Only sessions of this task."),
            "status": (TEXT, "Only sessions that are so, in a word of the original: READY, RUNNING, COMPLETED …"),
            "limit": (count(1000, 200), "At most so many."),
        },
        errors=(422,),
    ),
    "nodes.health": Described(),
    "nodes.healthz": Described(),
    "nodes.readyz": Described(errors=(503,)),
    "nodes.list_nodes": Described(),
    "nodes.get_node": Described(errors=(404,)),
    "nodes.drain_node": Described(errors=(404,)),
    "nodes.resume_node": Described(errors=(404,)),
    "policy.get_policy": Described(),
    "policy.put_policy": Described(body=PolicyRequest, errors=(422,)),
    "policy.pause": Described(
        query={
            "mode": (
                {"type": "string", "enum": ["drain", "abort"], "default": "drain"},
                "`drain` lets calls in flight end; `abort` cuts them off, to be continued from what they have.",
            ),
            "wait": ({**SECONDS, "maximum": 3600, "default": 300}, "Seconds until which every proxy has to hold."),
        },
        errors=(409, 422, 504),
    ),
    "weights.push": Described(body=PushRequest, errors=(409, 422, 502, 504)),
    "policy.resume": Described(
        query={"wait": ({**SECONDS, "maximum": 3600, "default": 10}, "Seconds in which every proxy should go on.")},
        errors=(422,),
    ),
    "metrics.show": Described(media_types=("text/plain",)),
    "openapi.document": Described(),
}
