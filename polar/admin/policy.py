"""The policy and its gate: which version is stamped, who holds, and pausing every node at once.

Pausing is asked for here and answered at once: the page shows who holds, as the proxies say it.
"""

from __future__ import annotations

from typing import Any

from flask import flash, redirect, request, url_for
from werkzeug.wrappers import Response

from polar import policy as gate
from polar.admin.page import blueprint, database, page
from polar.policy import GateMode


@blueprint.get("/policy")
@page("admin/policy.html")
def policy() -> dict[str, Any]:
    """Name, version, the gate, and every living proxy process."""
    return _values()


@blueprint.get("/live/policy", endpoint="policy_live")
@page("admin/_policy.html")
def live() -> dict[str, Any]:
    """What of it changes."""
    return _values()


def _values() -> dict[str, Any]:
    with database() as db:
        row, standing = gate.current(db), gate.standing(db)
    return {"row": row, "standing": standing, "late": standing.not_holding() if row.gate != GateMode.OPEN else []}


@blueprint.route("/policy/pause", methods=["GET", "POST"])
@page("admin/confirm.html")
def pause() -> dict[str, Any] | Response:
    """Ask how, then close the gate of every node."""
    back = url_for("admin.policy")
    if request.method == "POST":
        mode = GateMode.ABORT if request.form.get("mode") == GateMode.ABORT else GateMode.DRAIN
        with database() as db:
            gate.change(db, gate=mode.value)
        flash("Generation is paused on every node; this page says who holds.")
        return redirect(back, 303)
    return {
        "title": "Pause generation on every node?",
        "says": "No new model call begins anywhere until you resume. Agents wait; their budgets run on.",
        "does": "Pause",
        "back": back,
        "choices": (
            "mode",
            [
                (GateMode.DRAIN.value, "Let calls in flight end by themselves"),
                (GateMode.ABORT.value, "Cut calls in flight; they go on from there"),
            ],
        ),
        "crumbs": [("Policy", back)],
    }


@blueprint.route("/policy/resume", methods=["GET", "POST"])
@page("admin/confirm.html")
def resume() -> dict[str, Any] | Response:
    """Ask, then open the gate."""
    back = url_for("admin.policy")
    if request.method == "POST":
        with database() as db:
            gate.change(db, gate=GateMode.OPEN.value)
        flash("Generation goes on.")
        return redirect(back, 303)
    says = "Every node lets its waiting calls go. If a trainer paused to push weights, resume only once it is done."
    return {
        "title": "Resume generation?",
        "says": says,
        "does": "Resume",
        "back": back,
        "crumbs": [("Policy", back)],
    }
