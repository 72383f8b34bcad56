"""Nodes and lanes: who is there, what waits where, what each engine can do; taking a node out of service and back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from flask import flash, redirect, request, url_for
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from polar import listing, policy, queries
from polar.admin.page import blueprint, database, page
from polar.errors import NotFoundError
from polar.lifecycle import LANE_ALIVE_SECONDS, STAGES, Stage, State
from polar.models import Lane, Node, now

Load = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class LaneCard:
    """A lane with its queues, as the pages show it."""

    lane: Lane
    alive: bool
    queues: tuple[tuple[Stage, int, int], ...]
    """(stage, waiting, running)."""

    @property
    def busy(self) -> float:
        """How much of its room to execute is taken, from 0 to 1."""
        running = next(count for stage, _, count in self.queues if stage is Stage.EXECUTE)
        return min(running / self.lane.max_execute, 1.0) if self.lane.max_execute else 0.0

    @property
    def engine(self) -> tuple[str, str]:
        """How its engine is, as (word, sentence)."""
        known = self.lane.passport
        if not self.alive:
            return "away", "the lane's worker does not beat; start it: celery -A polar worker -Q " + self.lane.name
        if not known:
            return "unknown", "its engine has not been probed yet; the worker does so once it answers"
        if known.get("error"):
            return "broken", str(known["error"])
        if known.get("scripted"):
            return "scripted", "answers are replayed, not sampled"
        return "ready", "probed and answering"


def lane_cards(db: Session, loads: dict[str | None, Load] | None = None) -> list[LaneCard]:
    """Every lane, in the order of their names."""
    found = listing.lane_loads(db) if loads is None else loads
    after = now() - timedelta(seconds=LANE_ALIVE_SECONDS)
    return [_card(lane, found.get(lane.name, {}), lane.heartbeat_at > after) for lane in queries.lanes(db)]


def _card(lane: Lane, load: Load, alive: bool) -> LaneCard:
    queues = tuple((s, load.get((s, State.QUEUED), 0), load.get((s, State.RUNNING), 0)) for s in STAGES)
    return LaneCard(lane, alive, queues)


@blueprint.get("/nodes")
@page("admin/nodes.html")
def nodes() -> dict[str, Any]:
    """Every node with its lanes."""
    return _values()


@blueprint.get("/live/nodes", endpoint="nodes_live")
@page("admin/_nodes.html")
def live() -> dict[str, Any]:
    """What of it changes."""
    return _values()


def _values() -> dict[str, Any]:
    with database() as db:
        loads = listing.lane_loads(db)
        cards = lane_cards(db, loads)
        rows = queries.nodes(db)
        proxies = policy.standing(db).proxies
    after = now() - timedelta(seconds=LANE_ALIVE_SECONDS)
    return {
        "nodes": [
            {
                "row": node,
                "alive": node.heartbeat_at > after,
                "lanes": [card for card in cards if card.lane.node_id == node.id],
                "proxies": [proxy for proxy in proxies if proxy.node_id == node.id],
            }
            for node in rows
        ],
        "unplaced": sum(loads.get(None, {}).values()),
    }


@blueprint.route("/nodes/<node_id>/drain", methods=["GET", "POST"])
@page("admin/confirm.html")
def drain(node_id: str) -> dict[str, Any] | Response:
    """Ask, then let the node take nothing new."""
    return _turn(
        node_id,
        True,
        f"Drain node {node_id}?",
        "Its lanes take nothing new; what runs there runs to its end. It can be taken back into service at any time.",
        "Drain the node",
    )


@blueprint.route("/nodes/<node_id>/undrain", methods=["GET", "POST"])
@page("admin/confirm.html")
def undrain(node_id: str) -> dict[str, Any] | Response:
    """Ask, then take the node back into service."""
    says = "Its lanes take new sessions again, as far as they have room."
    return _turn(node_id, False, f"Take node {node_id} back into service?", says, "Take it back")


def _turn(node_id: str, draining: bool, title: str, says: str, does: str) -> dict[str, Any] | Response:
    back = url_for("admin.nodes")
    with database() as db:
        node = db.get(Node, node_id)
        if node is None:
            raise NotFoundError(f"no node {node_id!r}")
        if request.method == "POST":
            node.draining = draining
            flash(f"Node {node_id} {'is draining' if draining else 'takes new sessions again'}.")
            return redirect(back, 303)
    return {"title": title, "says": says, "does": does, "back": back, "crumbs": [("Nodes", back)]}
