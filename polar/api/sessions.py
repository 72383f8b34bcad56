"""Sessions: state, story, trajectory and completions of one attempt at a task."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import orjson
from flask import Blueprint, Response, current_app, jsonify

from polar import lifecycle, queries
from polar.api import wire
from polar.api.tasks import number
from polar.bodies import Bodies, unpack
from polar.db import transaction
from polar.delivery import freshness
from polar.errors import NotFoundError
from polar.models import Completion, Media

blueprint = Blueprint("sessions", __name__)
SERVED_AS_IS = re.compile(r"image/(?:png|jpeg|gif|webp|avif|bmp)")
"""Of the types that a harness may name: what no browser runs."""


@blueprint.get("/rollout/session/<session_id>")
def get_session(session_id: str) -> Response:
    """Where it is, how it is doing, and what it has cost."""
    with transaction(current_app.config["DATABASE"]) as db:
        session = queries.session(db, session_id)
        answer = wire.session_row(session, session.task)
        answer |= {"agent_exit": session.agent_exit, "evaluation": session.verdict, "error_detail": session.error}
        return jsonify(answer)


@blueprint.delete("/rollout/session/<session_id>")
def cancel_session(session_id: str) -> Response:
    """Cancel one session; calling it again changes nothing."""
    with transaction(current_app.config["DATABASE"]) as db:
        session = queries.session(db, session_id)
        lifecycle.cancel(db, session)
        return jsonify(wire.session_row(session, session.task))


@blueprint.get("/rollout/session/<session_id>/events")
def events(session_id: str) -> Response:
    """Every move, in order."""
    with transaction(current_app.config["DATABASE"]) as db:
        queries.session(db, session_id)
        return jsonify({"events": [wire.event(row) for row in queries.events_of(db, session_id)]})


@blueprint.get("/rollout/session/<session_id>/trajectory")
def trajectory(session_id: str) -> Response:
    """The whole trajectory, token arrays and all."""
    with transaction(current_app.config["DATABASE"]) as db:
        session = queries.session(db, session_id)
        found = freshness.trajectories_of(db, [session_id]).get(session_id)
        return jsonify(wire.trajectory(session, session.task, found))


@blueprint.get("/rollout/session/<session_id>/completions")
def completions(session_id: str) -> Response:
    """Captured model calls, a page at a time: `after` is the last page's `next`."""
    limit = int(number("limit", 50, low=1, high=200))
    with transaction(current_app.config["DATABASE"]) as db:
        queries.session(db, session_id)
        rows = queries.completions_of(db, session_id, int(number("after", 0, low=0)), limit)
        following = rows[-1].seq if len(rows) == limit else None
        bodies = Bodies(rows)
        shown = [_completion(row, bodies.read(row, db)) for row in rows]
        return jsonify({"completions": shown, "next": following})


@blueprint.get("/rollout/media/<digest>")
def media(digest: str) -> Response:
    """A picture that a harness sent, as messages refer to it: `polar-media:<digest>`."""
    with transaction(current_app.config["DATABASE"]) as db:
        found = db.get(Media, digest)
        if found is None:
            raise NotFoundError(f"no picture {digest!r}")
        served = found.media_type if SERVED_AS_IS.fullmatch(found.media_type) else "application/octet-stream"
        headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
        return Response(found.data, mimetype=served, headers=headers)


def _completion(row: Completion, request: bytes) -> dict[str, Any]:
    logprobs = None if row.logprobs is None else np.frombuffer(row.logprobs, np.float32).astype(float).tolist()
    return {
        "completion_id": row.id,
        "attempt": row.attempt,
        "outcome": row.outcome,
        "dialect": row.dialect,
        "role": row.role,
        "parent_id": row.parent_id,
        "parent_reason": row.parent_reason,
        "model_requested": row.model_requested,
        "model_used": row.model_used,
        "request": orjson.loads(request),
        "answer": orjson.loads(unpack(row.answer)) if row.answer else None,
        "prompt_tokens": row.prompt_len,
        "trim": (row.parsed.get("ledger") or {}).get("trim", 0),
        "suffix_ids": np.frombuffer(row.suffix_ids, np.int32).tolist(),
        "output_ids": np.frombuffer(row.output_ids, np.int32).tolist(),
        "logprobs": logprobs,
        "finish_reason": row.finish_reason,
        "sampled_with": row.parsed.get("sampled_with") or {},
        "policy_versions": row.policy_versions,
        "flags": row.flags,
        "engine": row.engine,
        "error": row.error,
        "requested_at": row.requested_at.timestamp(),
        "finished_at": row.finished_at.timestamp() if row.finished_at else None,
        "delivered": row.delivered,
    }
