"""Sessions: the list, one session's story from its events, its conversation, verdict and logs, and cancelling it."""

from __future__ import annotations

from typing import Any

from flask import flash, g, redirect, request, url_for
from sqlalchemy import Row, select
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from polar import lifecycle, listing, queries, slices
from polar.admin import logs
from polar.admin.login import needs
from polar.admin.page import blueprint, chosen, database, page, whole
from polar.admin.story import explain, flat_tree, timeline
from polar.bodies import request_of
from polar.lifecycle import OPEN, STAGES, State
from polar.models import Completion, RolloutSession, Task

BLAMES = ("trainer", "node", "runtime", "harness", "engine", "evaluator", "budget", "cancelled")
MESSAGES = 30
"""Of a conversation, on one page."""


@blueprint.get("/sessions")
@page("admin/sessions.html")
def sessions() -> dict[str, Any]:
    """Of all tasks, newest first: the way to what failed, and to whom it is blamed on."""
    state, stage, blame = chosen("state", list(State)), chosen("stage", list(STAGES)), chosen("blame", BLAMES)
    asked = {"state": state, "stage": stage, "blame": blame, "lane": request.args.get("lane", "")}
    with database() as db:
        found = listing.sessions(
            db, state=state, stage=stage, blame=blame, lane=asked["lane"], cursor=request.args.get("at", "")
        )
        about = listing.estimated(db, "sessions")["sessions"]
        lanes = [lane.name for lane in queries.lanes(db)]
    return {
        "found": found,
        "about": about,
        "asked": asked,
        "states": list(State),
        "stages": STAGES,
        "blames": BLAMES,
        "lanes": lanes,
        "filtered": any(asked.values()),
    }


@blueprint.get("/sessions/<session_id>")
@page("admin/session.html")
def session(session_id: str) -> dict[str, Any]:
    """Everything of one session, the heavy parts a page at a time."""
    with database() as db:
        values = _standing(db, session_id)
        values |= _conversation(db, values["session"], values["calls"])
        row = values["session"]
        return values | {
            "traces": listing.traces_of(db, [session_id]).get(session_id, []),
            "trajectory": queries.trajectory_of(db, session_id),
            "logs": logs.files_of(session_id),
            "explain": explain,
            "neighbours": _neighbours(db, row),
        }


@blueprint.get("/live/sessions/<session_id>", endpoint="session_live")
@page("admin/_session.html")
def live(session_id: str) -> dict[str, Any]:
    """Where it is now."""
    with database() as db:
        return _standing(db, session_id)


@blueprint.get("/live/sessions/<session_id>/conversation", endpoint="conversation_live")
@page("admin/_conversation.html")
def live_conversation(session_id: str) -> dict[str, Any]:
    """What was said so far."""
    with database() as db:
        row, task = _found(db, session_id)
        return {"session": row, "task": task, **_conversation(db, row, slices.calls_of(db, session_id))}


def _found(db: Session, session_id: str) -> tuple[RolloutSession, Row[Any]]:
    row = queries.session(db, session_id)
    task = select(*listing.TASK_COLUMNS, Task.spec["timeout_seconds"].label("timeout")).where(Task.id == row.task_pk)
    return row, db.execute(task).one()


def _standing(db: Session, session_id: str) -> dict[str, Any]:
    row, task = _found(db, session_id)
    events = listing.events_of(db, session_id)
    calls = slices.calls_of(db, session_id)
    return {
        "session": row,
        "task": task,
        "open": row.state in OPEN,
        "events": events,
        "calls": calls,
        "more_calls": len(calls) == slices.MAX_CALLS,
        "tree": flat_tree(calls),
        "timeline": timeline(row, events, calls),
    }


def _neighbours(db: Session, row: RolloutSession) -> dict[str, str]:
    """The sessions of the same task beside this one."""
    numbers = (row.number - 1, row.number + 1)
    query = select(RolloutSession.number, RolloutSession.id)
    found = db.execute(query.where(RolloutSession.task_pk == row.task_pk, RolloutSession.number.in_(numbers)))
    return {"before" if number < row.number else "after": session_id for number, session_id in found}


def _conversation(db: Session, row: RolloutSession, calls: Any) -> dict[str, Any]:
    """The messages up to one call: the one that is asked for, else the last of the main line."""
    known = {call.id: call for call in calls}
    chosen_call = known.get(request.args.get("call", "")) or _last(calls, row.execute_attempt)
    if chosen_call is None:
        return {"messages": [], "pages": 0, "place": 0, "call": None}
    completion = db.get_one(Completion, chosen_call.id)
    said = slices.conversation(completion, request_of(db, completion.id))
    messages = [*said.messages, *([said.answer] if said.answer else [])]
    pages = max(1, -(-len(messages) // MESSAGES))
    place = whole("m", pages if row.state in OPEN else 1, 1, pages)
    first = (place - 1) * MESSAGES
    by = _answered_by(chosen_call, known)
    shown = list(enumerate(messages[first : first + MESSAGES], first))
    return {
        "messages": shown,
        "by": by,
        "total": len(messages),
        "pages": pages,
        "place": place,
        "call": chosen_call,
        "tools": said.tools,
    }


def _last(calls: Any, attempt: int | None) -> Row[Any] | None:
    mine = [call for call in calls if attempt in (None, call.attempt)] or list(calls)
    main = [call for call in mine if call.role == "main" and call.outcome != "failed"]
    return max(main or mine, key=lambda call: (call.context_len, call.seq), default=None)


def _answered_by(call: Row[Any], known: dict[str, Row[Any]]) -> dict[int, Row[Any]]:
    """Which call sampled which message: its answer stands right behind the messages that it was asked."""
    found: dict[int, Row[Any]] = {}
    current: Row[Any] | None = call
    while current is not None and current.context_len not in found:
        found[current.context_len] = current
        current = known.get(current.parent_id) if current.parent_id else None
    return found


@blueprint.route("/sessions/<session_id>/cancel", methods=["GET", "POST"])
@needs("submit")
@page("admin/confirm.html")
def cancel_session(session_id: str) -> dict[str, Any] | Response:
    """Ask, then cancel it."""
    back = url_for("admin.session", session_id=session_id)
    if request.method == "POST":
        with database() as db:
            done = lifecycle.cancel(db, queries.session(db, session_id), f"cancelled on the pages by {g.who.name}")
        flash("The session is cancelled." if done else "The session had ended already; nothing was done.")
        return redirect(back, 303)
    with database() as db:
        row = queries.session(db, session_id)
    return {
        "title": "Cancel this session?",
        "says": f"It is {row.state} in {row.stage}. Its agent is killed and its runtime removed. "
        "This cannot be undone.",
        "does": "Cancel the session",
        "back": back,
        "crumbs": [("Sessions", url_for("admin.sessions")), (session_id, back)],
    }


@blueprint.get("/sessions/<session_id>/logs/<int:attempt>/<name>")
@page("admin/log.html")
def log(session_id: str, attempt: int, name: str) -> dict[str, Any]:
    """One file of a session's logs, a piece at a time, its end first."""
    with database() as db:
        queries.session(db, session_id)
    return {"session_id": session_id, "log": logs.read(session_id, attempt, name, whole("from", -1, low=-1))}
