"""Tasks: the list, one task as the group that a trainer sees, and cancelling it."""

from __future__ import annotations

import re
import uuid
from datetime import datetime, timedelta
from typing import Any

from flask import flash, redirect, request, url_for
from markupsafe import Markup
from sqlalchemy import select
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from polar import evaluators, harnesses, lifecycle, listing, queries
from polar.admin import charts
from polar.admin.login import needs
from polar.admin.page import blueprint, chosen, database, page, whole
from polar.admin.words import decimal
from polar.errors import NotFoundError
from polar.lifecycle import TaskState
from polar.listing import ORDERS, TaskFilter
from polar.models import RolloutSession, Task, now

AGES = {"1h": timedelta(hours=1), "24h": timedelta(hours=24), "7d": timedelta(days=7), "30d": timedelta(days=30)}
BINS = 20
MASK = "•••"
SECRET_NAMES = re.compile(r"secret|token$|password|api_?key|authorization", re.IGNORECASE)
USER_IN_URL = re.compile(r"(?<=[a-z]{2})://[^/@\s]+@")


@blueprint.get("/tasks")
@page("admin/tasks.html")
def tasks() -> dict[str, Any] | Response:
    """Filtered, searched, ordered, a page at a time."""
    name = request.args.get("q", "").strip()
    if name.startswith("ses-"):
        return _to_session(name)
    wanted = TaskFilter(
        state=chosen("state", list(TaskState)),
        harness=request.args.get("harness", ""),
        evaluator=request.args.get("evaluator", ""),
        group=request.args.get("group", ""),
        name=name,
        since=_since(),
    )
    order = chosen("order", ORDERS, "newest")
    with database() as db:
        found = listing.tasks(db, wanted, order, request.args.get("at", ""))
        counts = listing.counts_of(db, [row.id for row in found.rows])
        about = listing.estimated(db, "tasks")["tasks"]
    return {
        "found": found,
        "counts": counts,
        "about": about,
        "wanted": wanted,
        "order": order,
        "orders": list(ORDERS),
        "states": list(TaskState),
        "harnesses": sorted(harnesses.HARNESSES),
        "evaluators": sorted(evaluators.EVALUATORS),
        "ages": list(AGES),
        "age": chosen("age", AGES),
        "filtered": wanted != TaskFilter(),
    }


def _since() -> datetime | None:
    age = AGES.get(request.args.get("age", ""))
    return now() - age if age else None


def _to_session(name: str) -> Response:
    with database() as db:
        found = db.scalars(
            select(RolloutSession.id)
            .where(RolloutSession.id >= name, RolloutSession.id < name + "\uffff")
            .order_by(RolloutSession.id)
            .limit(1)
        ).first()
    if found is None:
        raise NotFoundError(f"no session begins with {name!r}; give its id as the list of sessions shows it")
    return redirect(url_for("admin.session", session_id=found), 303)


@blueprint.get("/tasks/<task_id>")
@page("admin/task.html")
def task(task_id: str) -> dict[str, Any]:
    """The group: its figures, its rewards, its sessions."""
    with database() as db:
        return _values(db, _found(db, task_id))


@blueprint.get("/live/tasks/<task_id>", endpoint="task_live")
@page("admin/_task.html")
def live(task_id: str) -> dict[str, Any]:
    """What of it changes."""
    with database() as db:
        return _values(db, _found(db, task_id))


def _values(db: Session, row: Task) -> dict[str, Any]:
    after = whole("after", -1, low=-1)
    figures = listing.group_figures(db, row.id)
    sessions = listing.sessions_of(db, row.id, after)
    return {
        "task": row,
        "figures": figures,
        "states": listing.counts_of(db, [row.id])[row.id]["states"],
        "sessions": sessions,
        "traces": listing.traces_of(db, [each.id for each in sessions]),
        "fidelities": listing.fidelity_counts(db, row.id),
        "histogram": _histogram(db, row, figures),
        "first": after + 1,
        "following": sessions[-1].number if len(sessions) == listing.ROWS else None,
        "older": _others(db, row),
    }


def _others(db: Session, row: Task) -> list[Any]:
    """Tasks that had this name before, or have it now."""
    query = select(Task.id, Task.created_at, Task.state, Task.current)
    query = query.where(Task.task_id == row.task_id, Task.id != row.id)
    return list(db.execute(query.order_by(Task.created_at.desc()).limit(20)))


def _histogram(db: Session, row: Task, figures: dict[str, Any]) -> Markup | None:
    if not figures["rewarded"]:
        return None
    low, high = min(0.0, figures["least"]), max(1.0, figures["most"])
    counts = listing.reward_counts(db, row.id, low, high, BINS)
    says = (
        f"{figures['rewarded']} rewards from {decimal(figures['least'])} to {decimal(figures['most'])}, "
        f"mean {decimal(figures['mean'])}"
    )
    return charts.histogram(counts, low, high, says)


def _found(db: Session, task_id: str) -> Task:
    """The current task of that name, or the one whose row is asked for."""
    asked = request.args.get("row", "")
    if not asked:
        return queries.task(db, task_id)
    try:
        found = db.get(Task, uuid.UUID(asked))
    except ValueError:
        found = None
    if found is None or found.task_id != task_id:
        raise NotFoundError(f"no such row of task {task_id!r}")
    return found


@blueprint.get("/tasks/<task_id>/spec")
@page("admin/spec.html")
def task_spec(task_id: str) -> dict[str, Any]:
    """What the trainer posted, with every default."""
    with database() as db:
        row = _found(db, task_id)
    return {"task": row, "spec": masked(row.spec)}


def masked(value: Any, secret: bool = False) -> Any:
    """A spec without what may be secret: values of variables, and of fields whose name says so."""
    if isinstance(value, dict):
        return {
            name: masked(each, secret or name == "env" or bool(SECRET_NAMES.search(name)))
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [masked(each, secret) for each in value]
    if secret and value not in (None, ""):
        return MASK
    return USER_IN_URL.sub(f"://{MASK}@", value) if isinstance(value, str) else value


@blueprint.route("/tasks/<task_id>/cancel", methods=["GET", "POST"])
@needs("submit")
@page("admin/confirm.html")
def cancel_task(task_id: str) -> dict[str, Any] | Response:
    """Ask, then cancel every session that has not ended."""
    back = url_for("admin.task", task_id=task_id)
    if request.method == "POST":
        with database() as db:
            lifecycle.cancel_task(db, task_id)
        flash(f"Task {task_id} is cancelled.")
        return redirect(back, 303)
    with database() as db:
        row = queries.task(db, task_id)
        states = listing.counts_of(db, [row.id])[row.id]["states"]
    left = sum(states.get(state, 0) for state in lifecycle.OPEN)
    return {
        "title": f"Cancel task {task_id}?",
        "says": f"{left} of its {row.num_samples} sessions have not ended. Their agents are killed and their runtimes "
        "removed; what has ended stays. This cannot be undone.",
        "does": "Cancel the task",
        "back": back,
        "crumbs": [("Tasks", url_for("admin.tasks")), (task_id, back)],
    }
