"""The bare recorder's routes: open a session, run a harness anywhere, close it. `polar.recording` does it."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any, Literal

from flask import Blueprint, Response, current_app, jsonify, request
from pydantic import Field, ValidationError
from sqlalchemy import func, select

from polar import admission, lifecycle, queries, recording
from polar.api import auth, wire
from polar.api.tasks import allowance, check_families, json_body, number
from polar.db import after_commit, transaction
from polar.delivery import freshness
from polar.errors import SpecError
from polar.models import Completion
from polar.spec import (
    AgentSpec,
    EvaluatorSpec,
    SamplingSpec,
    Spec,
    StrategySpec,
    TaskId,
    TaskRequest,
    validation_errors,
)

blueprint = Blueprint("recorder", __name__)


class RecorderRequest(Spec):
    """What may be said of a session that is opened for recording; everything is optional."""

    task_id: TaskId | None = None
    instruction: str = ""
    harness: str = "external"
    """Of the program that will run: its side calls are then told from its main loop."""
    model_name: str | None = None
    timeout_seconds: float = Field(default=3600.0, gt=0, le=7 * 86400)
    """After these it is closed with what it has."""
    builder: StrategySpec = StrategySpec(strategy="prefix_merging")
    evaluator: EvaluatorSpec | None = None
    sampling: SamplingSpec = SamplingSpec()
    max_turns: int | None = Field(default=None, ge=1)
    max_session_tokens: int | None = Field(default=None, ge=1)
    strict: bool = False
    lanes: tuple[str, ...] | None = None
    callback_url: str | None = None
    callback_events: tuple[Literal["task", "session"], ...] = ("task",)
    metadata: dict[str, Any] = {}


@blueprint.post("/sessions")
def open_session() -> Response:
    """A base URL and a key for a harness that Polar does not start."""
    task = _task(json_body() if request.get_data() else {})
    with transaction(current_app.config["DATABASE"]) as db:
        admission.admit(db, task, allowance(), auth.caller())
        admission.check_age(db, task)
        opened = recording.open_session(db, task, auth.caller())
        answer = _shown(opened.session, 0)
        answer |= {"base_url": opened.base_url, "api_key": opened.api_key}
        answer["base_urls"] = {
            "openai": f"{opened.base_url}/v1",
            "anthropic": opened.base_url,
            "google": opened.base_url,
            "without_a_key": f"{opened.base_url}/s/{opened.api_key}",
        }
        return jsonify(answer)


@blueprint.get("/sessions/<session_id>")
def get_session(session_id: str) -> Response:
    """As it is now, with its result once it has ended."""
    with transaction(current_app.config["DATABASE"]) as db:
        session = queries.session(db, session_id)
        answer = _shown(session, _count(db, session_id))
        if session.ended_at is not None:
            found = freshness.trajectories_of(db, [session_id]).get(session_id)
            answer["result"] = wire.session_result(session, session.task, found)
        return jsonify(answer)


@blueprint.post("/sessions/<session_id>/close")
def close_session(session_id: str) -> Response:
    """The harness is done: build and evaluate. Calling it again changes nothing."""
    dispatcher = current_app.config["DISPATCHER"]
    with transaction(current_app.config["DATABASE"]) as db:
        session = queries.session(db, session_id)
        if recording.close_session(db, session) and session.ended_at is None:
            after_commit(db, partial(dispatcher.wake, session.id, session.stage, str(session.lane)))
        return jsonify(_shown(session, _count(db, session_id)))


@blueprint.delete("/sessions/<session_id>")
def drop_session(session_id: str) -> Response:
    """Cancel it; what was recorded stays on record."""
    with transaction(current_app.config["DATABASE"]) as db:
        session = queries.session(db, session_id)
        lifecycle.cancel(db, session)
        return jsonify({**_shown(session, _count(db, session_id)), "deleted": True, "messages_deleted": 0})


@blueprint.get("/sessions")
def list_sessions() -> Response:
    """Sessions, newest first; filters task_id, status (a word of the original), limit."""
    limit = int(number("limit", 200, low=1, high=1000))
    with transaction(current_app.config["DATABASE"]) as db:
        rows = queries.recent_sessions(db, request.args.get("task_id"), limit)
        shown = [wire.session_row(each, each.task) for each in rows]
        status = request.args.get("status")
        return jsonify({"sessions": [each for each in shown if status in (None, each["status"])]})


def _task(body: Any) -> TaskRequest:
    if isinstance(body, dict) and "agent" in body:
        raise SpecError.at("agent", "a session with an agent is part of a task: POST /rollout/task/submit")
    try:
        asked = RecorderRequest.model_validate(body)
        values = asked.model_dump(exclude={"harness", "model_name", "task_id"})
        agent = AgentSpec(harness=asked.harness, model_name=asked.model_name)
        task = TaskRequest(task_id=asked.task_id or f"recording-{uuid.uuid4().hex}", agent=agent, **values)
    except ValidationError as error:
        errors = validation_errors(error)
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors[:5]), errors=errors) from None
    check_families(task, started_here=False)
    return task


def _shown(session: Any, completion_count: int) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "task_id": session.task.task_id,
        "created_at": session.created_at.timestamp(),
        "completion_count": completion_count,
        "status": wire.session_status(session),
        "node_id": session.node_id,
        "lane": session.lane,
        "result": None,
    }


def _count(db: Any, session_id: str) -> int:
    return db.scalar(select(func.count()).select_from(Completion).where(Completion.session_id == session_id)) or 0
