"""The policy's row: its version, and the gate before every generation. The only writer of that row.

While the gate is closed the clocks of all sessions stand still: a deadline then counts from the moment at which it
closed, and when it opens, every open session's deadline is put off by the pause. Says who holds and what became of the
calls in flight, as the proxies' own rows tell it. Holding is the proxies' affair, answering the API's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from polar.models import Policy, Proxy, now
from polar.session_clock import Pauses

CHANNEL = "polar_policy"
"""Notified with every change; whoever misses it reads the row within a second."""
PROXY_ALIVE_SECONDS = 5.0
PROXY_REMEMBERED_SECONDS = 600.0
"""How long a proxy that stopped beating with calls in flight is named as lost."""
Version = int | str


class GateMode(StrEnum):
    """Whether generations may begin."""

    OPEN = "open"
    DRAIN = "drain"
    """Nothing begins; what is in flight ends by itself."""
    ABORT = "abort"
    """Nothing begins; what is in flight is cut, and goes on from there once the gate is open."""


def number(version: object) -> int | None:
    """A version as a whole number, however it is spelled; None if it is none, and cannot be compared."""
    if isinstance(version, bool):
        return None
    if isinstance(version, int):
        return version
    if isinstance(version, str) and version.removeprefix("-").isdecimal() and version.isascii():
        return int(version)
    return None


def spelled(version: str | None) -> Version | None:
    """A version as it is kept, in the form in which it goes out: whole numbers as numbers."""
    whole = number(version)
    return version if whole is None or str(whole) != version else whole


def current(db: Session, *, lock: bool = False) -> Policy:
    """The row, made at its first use."""
    if (found := db.get(Policy, 1, with_for_update=lock or None)) is not None:
        return found
    values = {"id": 1, "gate": GateMode.OPEN.value, "epoch": 0, "updated_at": now()}
    db.execute(insert(Policy).values(values).on_conflict_do_nothing())
    return db.scalars(select(Policy).with_for_update()).one()


def change(db: Session, **values: Any) -> Policy:
    """Change what differs; every proxy hears of it with the commit."""
    row = current(db, lock=True)
    if all(getattr(row, name) == value for name, value in values.items()):
        return row
    was = row.gate
    for name, value in values.items():
        setattr(row, name, value)
    if (was == GateMode.OPEN) != (row.gate == GateMode.OPEN):
        _stop_or_start_clocks(db, row)
    row.epoch += 1
    row.updated_at = now()
    db.flush()
    db.execute(text("SELECT pg_notify(:channel, :epoch)"), {"channel": CHANNEL, "epoch": str(row.epoch)})
    return row


# One statement, in the order in which others lock several sessions. A recording's lease is its whole time.
PUT_OFF = text(
    """
    WITH counting AS (
        SELECT id FROM sessions WHERE ended_at IS NULL AND (deadline_at IS NOT NULL OR lease_until IS NOT NULL)
        ORDER BY id FOR NO KEY UPDATE
    )
    UPDATE sessions s SET
        deadline_at = s.deadline_at + make_interval(secs => :pause),
        lease_until = s.lease_until + make_interval(secs => CASE WHEN s.worker IS NULL THEN :pause ELSE 0 END)
    FROM counting WHERE s.id = counting.id
    """
)


def _stop_or_start_clocks(db: Session, row: Policy) -> None:
    moment = db.scalars(select(func.clock_timestamp())).one()
    if row.closed_at is None:
        row.closed_at = moment
        return
    pause = (moment - row.closed_at).total_seconds()
    row.closed_at, row.closed_seconds = None, row.closed_seconds + pause
    db.execute(PUT_OFF, {"pause": pause})


def pauses(db: Session) -> Pauses:
    """How long the gate was closed until now."""
    since = func.extract("epoch", func.clock_timestamp() - Policy.closed_at)
    found = db.execute(select(Policy.closed_seconds, since)).one_or_none()
    if found is None:
        return Pauses()
    total, closed_for = found
    return Pauses(total, None if closed_for is None else float(closed_for))


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the living proxies are with the policy's row."""

    proxies: Sequence[Proxy]
    lost: Sequence[Proxy]
    """Those that stopped beating with calls in flight: their processes are gone, or cannot reach the database."""
    epoch: int
    gate: str

    def behind(self) -> list[Proxy]:
        """Those that do not act on the row as it is now."""
        return [each for each in self.proxies if each.epoch < self.epoch]

    def not_holding(self) -> list[Proxy]:
        """Those that may still be sampling."""
        return [each for each in self.proxies if each.epoch < self.epoch or each.in_flight]

    def fate(self) -> dict[str, int]:
        """What became of the calls that were in flight when the gate closed, and of those that came later."""
        names = ("drained", "aborted", "held", "in_flight")
        return {name: sum(getattr(each, name) for each in self.proxies) for name in names}


def standing(db: Session) -> Standing:
    """As the proxies said at their last heartbeats."""
    row = current(db)
    age = func.extract("epoch", func.clock_timestamp() - Proxy.heartbeat_at)
    alive = db.scalars(select(Proxy).where(age < PROXY_ALIVE_SECONDS).order_by(Proxy.id)).all()
    silent = select(Proxy).where(age >= PROXY_ALIVE_SECONDS, age < PROXY_REMEMBERED_SECONDS, Proxy.in_flight > 0)
    return Standing(alive, db.scalars(silent.order_by(Proxy.id)).all(), row.epoch, row.gate)
