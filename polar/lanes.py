"""Nodes and lanes as rows: who is there, alive, and draining. What they are made of is the topology's affair."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from polar.lifecycle import CLOCK, LANE_ALIVE_SECONDS, rowcount
from polar.models import Beat, Lane, Leftover, Node, RolloutSession
from polar.topology import LaneSpec, NodeSpec

SWEEPER = "sweep"


def beat(db: Session, node: NodeSpec, lane: LaneSpec) -> None:
    """Say that this lane and its node are here; makes their rows the first time."""
    alive = {"gateway_url": node.url, "heartbeat_at": CLOCK}
    db.execute(insert(Node).values(id=node.id, **alive).on_conflict_do_update(index_elements=["id"], set_=alive))
    values: dict[str, Any] = {
        "node_id": node.id,
        "engine": lane.engine.model_dump(mode="json"),
        "max_execute": lane.max_execute,
        "ready_buffer": lane.ready_buffer,
        "max_evaluate": lane.max_evaluate,
        "heartbeat_at": CLOCK,
    }
    db.execute(
        insert(Lane).values(name=lane.name, **values).on_conflict_do_update(index_elements=["name"], set_=values)
    )


def swept(db: Session) -> None:
    """Note that the sweeper made its round."""
    row = insert(Beat).values(name=SWEEPER, at=CLOCK)
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


def note_engine(db: Session, name: str, error: str | None) -> bool:
    """Keep whether a lane's engine answers (None) or what was found instead; True if that is news."""
    if error is None:
        up = Lane.engine_down_since.is_not(None)
        values: dict[str, Any] = {"engine_down_since": None, "engine_error": None}
    else:
        up = Lane.engine_down_since.is_(None)
        values = {"engine_down_since": CLOCK, "engine_error": error}
    return bool(rowcount(db.execute(update(Lane).where(Lane.name == name, up).values(**values))))


def alive(db: Session) -> list[Lane]:
    """Lanes that beat lately on nodes that are not draining."""
    after = CLOCK - timedelta(seconds=LANE_ALIVE_SECONDS)
    return list(db.scalars(select(Lane).join(Node).where(Lane.heartbeat_at > after, Node.draining.is_(False))))


def takers(db: Session) -> list[Lane]:
    """Those of them that take sessions: their engines answer."""
    return [lane for lane in alive(db) if lane.engine_down_since is None]


def state(lane: Lane, *, alive: bool, draining: bool) -> str:
    """What a lane does, in one word: gone, engine_down, draining or pulling."""
    if not alive:
        return "gone"
    if lane.engine_down_since is not None:
        return "engine_down"
    return "draining" if draining else "pulling"


def draining(db: Session, node_id: str) -> bool:
    """Whether the node takes nothing new."""
    return bool(db.scalar(select(Node.draining).where(Node.id == node_id)))


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


def left_behind(db: Session, node_id: str) -> list[Leftover]:
    """What sessions that went to other nodes left on this one."""
    return list(db.scalars(select(Leftover).where(Leftover.node_id == node_id).order_by(Leftover.id).limit(50)))


def taken_away(db: Session, leftover_id: int) -> None:
    """Note that it is gone."""
    db.execute(delete(Leftover).where(Leftover.id == leftover_id))
