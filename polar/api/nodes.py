"""Nodes, lanes and health: who is there, and taking one out of service."""

from __future__ import annotations

from functools import partial
from typing import Any

from flask import Blueprint, Response, current_app, jsonify
from sqlalchemy import text
from sqlalchemy.orm import Session

from polar import lanes, queries
from polar.api import wire
from polar.db import after_commit, transaction
from polar.errors import NotFoundError

blueprint = Blueprint("nodes", __name__)


@blueprint.get("/health")
def health() -> Response:
    """This process reaches its database; how many nodes are alive."""
    with transaction(current_app.config["DATABASE"]) as db:
        healthy = {lane.node_id for lane in lanes.alive(db)}
        return jsonify({"status": "ok", "nodes": len(healthy)})


@blueprint.get("/healthz")
def healthz() -> Response:
    """This process answers."""
    return jsonify({"status": "ok"})


@blueprint.get("/readyz")
def readyz() -> Response:
    """This process reaches its database, and a lane is there to work."""
    with transaction(current_app.config["DATABASE"]) as db:
        db.execute(text("SELECT 1"))
        names = [lane.name for lane in lanes.alive(db)]
    answer = jsonify({"status": "ok" if names else "no lane is alive; start a worker: celery -A polar worker -Q gpu0"})
    answer.status_code = 200 if names else 503
    return answer


@blueprint.get("/nodes")
def list_nodes() -> Response:
    """Every node with its lanes and how full they are."""
    with transaction(current_app.config["DATABASE"]) as db:
        all_lanes, loads = queries.lanes(db), queries.loads(db)
        return jsonify([wire.node(row, all_lanes, loads.get(row.id, {})) for row in queries.nodes(db)])


@blueprint.get("/nodes/<node_id>")
def get_node(node_id: str) -> Response:
    """One node with its lanes and how full they are."""
    with transaction(current_app.config["DATABASE"]) as db:
        return jsonify(_one(db, node_id))


@blueprint.delete("/nodes/<node_id>")
def drain_node(node_id: str) -> Response:
    """Take nothing new; what runs there runs to its end."""
    with transaction(current_app.config["DATABASE"]) as db:
        answer = _one(db, node_id)
        queries.nodes(db, node_id)[0].draining = True
        return jsonify({**answer, "draining": True})


@blueprint.post("/nodes/<node_id>/resume")
def resume_node(node_id: str) -> Response:
    """Take new sessions again."""
    dispatcher = current_app.config["DISPATCHER"]
    with transaction(current_app.config["DATABASE"]) as db:
        answer = _one(db, node_id)
        queries.nodes(db, node_id)[0].draining = False
        for lane in answer["lanes"]:
            after_commit(db, partial(dispatcher.look, lane["name"]))
        return jsonify({**answer, "draining": False})


def _one(db: Session, node_id: str) -> dict[str, Any]:
    rows = queries.nodes(db, node_id)
    if not rows:
        raise NotFoundError(f"no node {node_id!r}")
    return wire.node(rows[0], queries.lanes(db), queries.loads(db).get(node_id, {}))
