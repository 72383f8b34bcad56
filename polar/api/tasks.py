"""Tasks: submit, ask, list, cancel."""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from typing import Any

import orjson
from flask import Blueprint, Response, current_app, jsonify, request
from werkzeug.exceptions import RequestEntityTooLarge

from polar import admission, builders, evaluators, harnesses, lanes, lifecycle, queries, runtimes
from polar.api import auth, wire
from polar.db import after_commit, transaction
from polar.delivery.callbacks import check_url
from polar.errors import SpecError
from polar.lifecycle import TaskState
from polar.nesting import DEEPEST, too_deep
from polar.spec import MAX_SESSIONS_PER_TASK, TaskRequest, parse_task

blueprint = Blueprint("tasks", __name__)
POLL_SECONDS = 0.2
MAX_WAIT_SECONDS = 60.0
LAST_SECOND = 253_402_300_799
"""Of the year 9999, where dates end."""
VIEWS = ("full", "summary")


@blueprint.post("/rollout/task/submit")
def submit() -> Response:
    """Persist a task and wake the lanes; answered once it is committed.

    With an Idempotency-Key, a submit that is sent again finds its task and makes no second one."""
    task = parse_task(json_body())
    check_families(task)
    dispatcher = current_app.config["DISPATCHER"]
    key_id, sent = auth.caller(), request.headers.get("Idempotency-Key")
    with transaction(current_app.config["DATABASE"]) as db:
        before = admission.admit(db, task, allowance(), key_id, sent)
        if before is not None:
            return jsonify({"task_id": before.task_id, "status": before.state, "duplicate": True})
        admission.check_age(db, task)
        lifecycle.submit(db, task, key_id, sent)
        for lane in lanes.takers(db):
            if task.lanes is None or lane.name in task.lanes:
                after_commit(db, partial(dispatcher.look, lane.name))
    return jsonify({"task_id": task.task_id, "status": TaskState.RUNNING})


def allowance() -> admission.Allowance:
    """What the settings let one key have open."""
    settings = current_app.config["POLAR"]
    return admission.Allowance(settings.max_open_tasks, settings.max_open_sessions)


def check_families(task: TaskRequest, *, started_here: bool = True) -> None:
    """Everything that is named exists, can do what is asked, and may be called. Raises SpecError."""
    if task.callback_url is not None:
        check_url(task.callback_url, current_app.config["POLAR"].callback_allow)
    if task.runtime is not None:
        runtimes.check(task.runtime)
    if not harnesses.create(task.agent).STARTED_HERE and started_here:
        raise SpecError.at("agent.harness", f"{task.agent.name!r} is started by somebody else: POST /sessions")
    builders.create(task.builder)
    if task.evaluator is not None:
        evaluators.create(task.evaluator)


def json_body() -> Any:
    """The request's body, parsed. Raises SpecError."""
    data = request.get_data()
    if len(data) >= (request.max_content_length or sys.maxsize):
        raise RequestEntityTooLarge  # one whose length nobody declared is cut there, and reads like a mistake
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SpecError.at("(body)", f"not valid JSON: {error}") from None
    if too_deep(body):
        raise SpecError.at("(body)", f"is nested more than {DEEPEST} levels deep")
    return body


@blueprint.get("/rollout/task/<task_id>")
def get_task(task_id: str) -> Response:
    """TaskStatus; `view=summary` leaves token arrays out, `wait=30` answers when the task ends or time is up."""
    full = view_is_full()
    end = time.monotonic() + min(number("wait", 0.0, low=0.0), MAX_WAIT_SECONDS)
    while True:
        with transaction(current_app.config["DATABASE"]) as db:
            task = queries.task(db, task_id)
            if task.ended_at is not None or time.monotonic() >= end:
                return jsonify(wire.load_task_status(db, task, full=full))
        time.sleep(POLL_SECONDS)


def view_is_full() -> bool:
    """Whether `view` asks for token arrays. Raises SpecError."""
    view = request.args.get("view", "full")
    if view not in VIEWS:
        raise SpecError.at("view", f"{view!r} is neither 'full' nor 'summary'")
    return view == "full"


@blueprint.delete("/rollout/task/<task_id>")
def cancel_task(task_id: str) -> Response:
    """Cancel every session that has not ended; calling it again changes nothing.

    With `register_if_missing=true` it may come before the submit, which is then refused."""
    early = request.args.get("register_if_missing", "false")
    if early not in ("true", "false"):
        raise SpecError.at("register_if_missing", f"{early!r} is neither 'true' nor 'false'")
    with transaction(current_app.config["DATABASE"]) as db:
        if early == "true":
            admission.cancel_early(db, task_id)
        else:
            lifecycle.cancel_task(db, task_id)
        db.flush()
        return jsonify(wire.load_task_status(db, queries.task(db, task_id), full=False))


@blueprint.get("/rollout/status")
def status() -> Response:
    """All tasks by name, sessions that are not done, and the nodes."""
    with transaction(current_app.config["DATABASE"]) as db:
        rows = queries.task_rows(db, state=None, harness=None, since=None, limit=10_000)
        lanes_, loads = queries.lanes(db), queries.loads(db)
        nodes = [wire.node(each, lanes_, loads.get(each.id, {})) for each in queries.nodes(db)]
        return jsonify(
            {
                "tasks": {row["task"].task_id: row["task"].state for row in rows},
                "pipeline": {"pending_sessions": queries.open_sessions(db)},
                "nodes": {"nodes": nodes},
            }
        )


@blueprint.get("/tasks")
def list_tasks() -> Response:
    """Tasks, newest first; filters status, harness, since (epoch seconds), limit."""
    since = number("since", None, low=0, high=LAST_SECOND)
    with transaction(current_app.config["DATABASE"]) as db:
        rows = queries.task_rows(
            db,
            state=request.args.get("status"),
            harness=request.args.get("harness"),
            since=since,
            limit=int(number("limit", 200, low=1, high=1000)),
        )
        means = queries.mean_traces(db, [row["task"].id for row in rows])
        return jsonify({"tasks": [wire.task_row(row, means.get(row["task"].id)) for row in rows]})


@blueprint.get("/tasks/<task_id>/sessions")
def list_sessions(task_id: str) -> Response:
    """A task's sessions as they are now: all, or with `limit` a page of them; `after` is the last page's `next`."""
    limit, after = number("limit", None, low=1, high=MAX_SESSIONS_PER_TASK), int(number("after", -1))
    with transaction(current_app.config["DATABASE"]) as db:
        task = queries.task(db, task_id)
        found = queries.sessions_of(db, task.id, after=after, limit=limit and int(limit))
        rows = [wire.session_row(each, task) for each in found]
        following = found[-1].number if limit and len(found) == int(limit) else None
        return jsonify({"task_id": task_id, "sessions": rows, "status": task.state, "next": following})


def number(name: str, default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A numeric query parameter. Raises SpecError."""
    raw = request.args.get(name)
    if raw is None:
        return default
    try:
        value = float(raw)
    except ValueError:
        raise SpecError.at(name, f"{raw!r} is not a number") from None
    if not math.isfinite(value):
        raise SpecError.at(name, f"{raw!r} is not a number that can be asked for")
    if (low is not None and value < low) or (high is not None and value > high):
        raise SpecError.at(name, f"must be between {low:g} and {high:g}" if high else f"must be at least {low:g}")
    return value
