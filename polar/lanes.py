"""Nodes and lanes as rows: who is there, alive, and draining. What they are made of is the topology's affair."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from polar.lifecycle import LANE_ALIVE_SECONDS
from polar.models import Beat, Lane, Node, RolloutSession, now
from polar.topology import LaneSpec, NodeSpec

SWEEPER = "sweep"


def beat(db: Session, node: NodeSpec, lane: LaneSpec) -> None:
    """Say that this lane and its node are here; makes their rows the first time."""
    alive = {"gateway_url": node.url, "heartbeat_at": now()}
    db.execute(insert(Node).values(id=node.id, **alive).on_conflict_do_update(index_elements=["id"], set_=alive))
    values: dict[str, Any] = {
        "node_id": node.id,
        "engine": lane.engine.model_dump(mode="json"),
        "max_execute": lane.max_execute,
        "ready_buffer": lane.ready_buffer,
        "max_evaluate": lane.max_evaluate,
        "heartbeat_at": now(),
    }
    db.execute(
        insert(Lane).values(name=lane.name, **values).on_conflict_do_update(index_elements=["name"], set_=values)
    )


def swept(db: Session) -> None:
    """Note that the sweeper made its round."""
    row = insert(Beat).values(name=SWEEPER, at=now())
    db.execute(row.on_conflict_do_update(index_elements=["name"], set_={"at": row.excluded.at}))


def last_swept(db: Session) -> datetime | None:
    """When the sweeper last made its round; None if it never did."""
    return db.scalar(select(Beat.at).where(Beat.name == SWEEPER))


def note_passport(db: Session, name: str, passport: dict[str, Any]) -> None:
    """Keep what was found out of a lane's engine."""
    db.execute(update(Lane).where(Lane.name == name).values(passport=passport))


def passport(db: Session, name: str) -> dict[str, Any]:
    """What is known of a lane's engine; empty if nothing is."""
    return db.scalar(select(Lane.passport).where(Lane.name == name)) or {}


def alive(db: Session) -> list[Lane]:
    """Lanes that beat lately on nodes that are not draining."""
    after = now() - timedelta(seconds=LANE_ALIVE_SECONDS)
    return list(db.scalars(select(Lane).join(Node).where(Lane.heartbeat_at > after, Node.draining.is_(False))))


def leftovers(db: Session, node_id: str) -> list[RolloutSession]:
    """Ended sessions of this node whose runtimes are still there."""
    return list(
        db.scalars(
            select(RolloutSession)
            .where(
                RolloutSession.node_id == node_id,
                RolloutSession.ended_at.is_not(None),
                RolloutSession.runtimes != {},
            )
            .limit(50)
        )
    )


def removed(db: Session, session_id: str) -> None:
    """Note that an ended session's runtimes are gone."""
    db.execute(
        update(RolloutSession)
        .where(RolloutSession.id == session_id, RolloutSession.ended_at.is_not(None))
        .values(runtimes={})
    )
