"""The results feed: every session that has ended, in one order, read by cursor. Formats are the API's affair.

A reader that has seen number N must never miss a session that turns up later with a smaller one. A number that is drawn
while a session ends cannot promise that: two transactions may draw 7 and 8 and commit as 8 and 7, or the one with 7
may take a minute, and a reader in between passes it by. So no number is drawn there. A session ends without one, and
gets its number afterwards, in a transaction of its own:

1. it locks the feed's one row, so one process gives numbers at a time, and whoever comes next waits for its commit;
2. it then reads the sessions that have ended and have no number. The statement begins after the lock is had, so it sees
   everything that was committed before, and nothing of what is still on its way: that gets its number in a later round;
3. it numbers them on from the row's `last`, and moves `last` along in the same transaction.

Numbers therefore become visible in their own order and without a gap: whoever reads `last` sees every session up to
it. Sessions that somebody has locked are left for the next round, so giving numbers waits for no one but another round,
and no session that ends waits for it. The counter is a row and not max(): a number is not given twice after its session
was deleted.

Readers give numbers before they read, so a session is in the feed as soon as its end is committed; the sweeper does
too, so that a feed that nobody reads for a day has no day's work waiting for its first reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import BigInteger, Engine, Text, column, func, literal, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.orm import Session, joinedload

from polar.db import transaction
from polar.delivery import freshness
from polar.errors import ConflictError, SpecError
from polar.models import Consumer, Feed, RolloutSession, Task, TraceRow, TrajectoryRow, now

NUMBERED_AT_ONCE = 500
LOADED_AT_ONCE = 4
"""Sessions held in memory while a page is written; one with many long traces has tens of megabytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A session and its number in the feed."""

    number: int
    session_id: str


@dataclass(frozen=True, slots=True)
class Page:
    """Places after a cursor, and the cursor that follows them."""

    places: Sequence[Place]
    next: int
    """Past the places; past everything that was looked at, if the page is not full."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A session of the feed with everything that its result is made of."""

    number: int
    session: RolloutSession
    task: Task
    trajectory: tuple[TrajectoryRow, list[TraceRow]] | None


def number_ended(database: Engine) -> int:
    """Give every session whose end is committed its number; how many got theirs here."""
    total = 0
    while count := _number_some(database):
        total += count
    return total


def _number_some(database: Engine) -> int:
    waiting = (
        select(RolloutSession.id)
        .where(RolloutSession.ended_at.is_not(None), RolloutSession.feed_number.is_(None))
        .order_by(RolloutSession.ended_at, RolloutSession.id)
        .limit(NUMBERED_AT_ONCE)
    )
    with transaction(database) as db:
        if db.scalar(waiting.limit(1)) is None:
            return 0
        db.execute(insert(Feed).values(id=1, last=0).on_conflict_do_nothing())
        feed = db.scalars(select(Feed).with_for_update()).one()
        # NO KEY UPDATE: rows of a session's completions, which lock its key, are not in the way.
        ids = db.scalars(waiting.with_for_update(key_share=True, skip_locked=True)).all()
        if ids:
            numbers = list(range(feed.last + 1, feed.last + 1 + len(ids)))
            given = func.unnest(literal(list(ids), ARRAY(Text())), literal(numbers, ARRAY(BigInteger())))
            place = given.table_valued(column("id", Text()), column("number", BigInteger())).render_derived()
            db.execute(
                update(RolloutSession)
                .where(RolloutSession.id == place.c.id)
                .values(feed_number=place.c.number)
                .execution_options(synchronize_session=False)
            )
            feed.last = numbers[-1]
        return len(ids)


def page(database: Engine, after: int, limit: int, *, group: str | None = None, task_id: str | None = None) -> Page:
    """What stands after the cursor `after`, at most `limit` places. Raises SpecError for a cursor of another feed."""
    number_ended(database)
    with transaction(database) as db:
        # Read first: everything up to `last` is there to be seen by the statement that follows.
        last = _last(db)
        if after > last:
            raise SpecError.at("after", f"{after} is past the end of the feed, {last}; it is of another database")
        query = select(RolloutSession.feed_number, RolloutSession.id).where(
            RolloutSession.feed_number > after, RolloutSession.feed_number <= last
        )
        if group is not None or task_id is not None:
            query = query.join(Task)
        if group is not None:
            query = query.where(Task.group_id == group)
        if task_id is not None:
            query = query.where(Task.task_id == task_id)
        rows = db.execute(query.order_by(RolloutSession.feed_number).limit(limit))
        places = [Place(number or 0, session_id) for number, session_id in rows]
    return Page(places, places[-1].number if len(places) == limit else last)


def end(database: Engine) -> int:
    """The cursor of a reader who wants only what ends from now on."""
    number_ended(database)
    with transaction(database) as db:
        return _last(db)


def load(database: Engine, places: Sequence[Place]) -> Iterator[list[Ended]]:
    """The sessions of these places with their traces, a few at a time; one that was deleted meanwhile is left out."""
    for start in range(0, len(places), LOADED_AT_ONCE):
        some = {place.session_id: place.number for place in places[start : start + LOADED_AT_ONCE]}
        with transaction(database) as db:
            query = select(RolloutSession).where(RolloutSession.id.in_(some)).options(joinedload(RolloutSession.task))
            sessions = sorted(db.scalars(query), key=lambda each: some[each.id])
            found = freshness.trajectories_of(db, list(some))
        yield [Ended(some[each.id], each, each.task, found.get(each.id)) for each in sessions]


def cursor_of(database: Engine, consumer: str) -> int:
    """How far a consumer has acknowledged; 0 for a name that never has."""
    with transaction(database) as db:
        found = db.get(Consumer, consumer)
        last = _last(db)
    cursor = found.cursor if found is not None else 0
    if cursor > last:
        said = f"consumer {consumer!r} is at {cursor}, past the end of the feed, {last}: it read another database; "
        raise ConflictError(said + "acknowledge an earlier cursor with rewind: true", code="cursor_past_end")
    return cursor


def acknowledge(database: Engine, consumer: str, cursor: int, *, rewind: bool = False) -> int:
    """Move a consumer's cursor, where it then is. It moves back only with `rewind`: a late repeat changes nothing."""
    with transaction(database) as db:
        last = _last(db)
        if cursor > last:
            raise SpecError.at("cursor", f"{cursor} is past the end of the feed, {last}")
        added = insert(Consumer).values(name=consumer, cursor=cursor, created_at=now(), updated_at=now())
        moved = cursor if rewind else func.greatest(Consumer.cursor, cursor)
        put = added.on_conflict_do_update(index_elements=["name"], set_={"cursor": moved, "updated_at": now()})
        return int(db.scalars(put.returning(Consumer.cursor)).one())


def _last(db: Session) -> int:
    return db.scalar(select(Feed.last)) or 0
