"""What the recorder promises of its one statement: all kinds at once, exact charges, and no row twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from polar.errors import NodeError
from polar.models import Media, RolloutSession, now
from polar.proxy.database import Database
from polar.proxy.recorder import Fence, Recorder
from polar.proxy.statements import arguments, statement
from tests.integration.rig import completions, open_session

pytestmark = pytest.mark.integration


@pytest.fixture
def fence(database: Engine) -> Fence:
    """An executing session."""
    name = open_session(database, "http://127.0.0.1:9")
    with Session(database) as db:
        session = db.get_one(RolloutSession, name)
        assert session.key_hash is not None
        return Fence(name, session.attempt, session.key_hash)


def intent(fence: Fence, name: str, **columns: Any) -> dict[str, Any]:
    """The beginning of a call."""
    return {
        "id": name,
        "session_id": fence.session_id,
        "attempt": fence.attempt,
        "outcome": "asked",
        "parent_reason": "root",
        "dialect": "openai_chat",
        "role": "main",
        "model_requested": "m",
        "request": b"body",
        "parsed": {"asked": {}},
        "context_len": 1,
        "prompt_len": 3,
        "suffix_ids": b"ids",
        "flags": ["first", "second"],
        "requested_at": now(),
        **columns,
    }


def recording(url: str, act: Callable[[Recorder], Awaitable[None]], note: float = 0.0) -> None:
    """Do something with a recorder that writes."""

    async def main() -> None:
        recorder = Recorder(url, 5.0, note)
        writing = asyncio.create_task(recorder.run())
        await act(recorder)
        recorder.close()
        await writing

    asyncio.run(main())


def charges(database: Engine, fence: Fence) -> tuple[int, int]:
    """Turns and tokens of the session."""
    with Session(database) as db:
        session = db.get_one(RolloutSession, fence.session_id)
        return session.turns, session.sampled_tokens


def test_everything_in_one_statement(database: Engine, database_url: str, fence: Fence) -> None:
    """Beginnings, ends, notes and pictures of one batch are all there, each as it was said."""
    picture = {"digest": "d", "media_type": "image/png", "data": b"png", "created_at": now()}

    async def act(recorder: Recorder) -> None:
        await recorder.intend([intent(fence, "cmp-a"), intent(fence, "cmp-b")], [picture])
        ends = {"outcome": "answered", "parsed": {"told": 1}, "output_ids": b"abcd", "flags": [["nested"]]}
        recorder.delivered("cmp-b")
        counts = await asyncio.gather(
            recorder.settle(fence, "cmp-a", ends, turns=1, tokens=5),
            recorder.settle(
                fence, "cmp-b", {"outcome": "failed", "parsed": {}, "error": {"code": "x"}}, turns=0, tokens=2
            ),
            recorder.intend([intent(fence, "cmp-c")], [picture]),
        )
        assert counts[:2] == [True, True]

    recording(database_url, act)
    rows = {row.id: row for row in completions(database)}
    assert {name: row.outcome for name, row in rows.items()} == {
        "cmp-a": "answered",
        "cmp-b": "failed",
        "cmp-c": "asked",
    }
    assert (rows["cmp-a"].parsed, rows["cmp-a"].flags) == ({"asked": {}, "told": 1}, [["nested"]])
    assert (rows["cmp-a"].prompt_len, rows["cmp-a"].suffix_ids, rows["cmp-c"].flags) == (3, b"ids", ["first", "second"])
    assert rows["cmp-b"].error == {"code": "x"}
    assert charges(database, fence) == (1, 7)
    with Session(database) as db:
        assert db.get_one(Media, "d").data == b"png"


def test_a_repeated_commit_charges_once(database: Engine, database_url: str, fence: Fence) -> None:
    """An end whose acknowledgement was lost is written again: it still counts, and is charged no second time."""

    async def act(recorder: Recorder) -> None:
        await recorder.intend([intent(fence, "cmp-a")])
        for _ in range(2):
            assert await recorder.settle(fence, "cmp-a", {"outcome": "answered", "parsed": {}}, turns=1, tokens=5)

    recording(database_url, act)
    assert charges(database, fence) == (1, 5)


def test_a_session_that_moved_on_is_not_charged(database: Engine, database_url: str, fence: Fence) -> None:
    """Beside an end that counts, one under a key that is dead is kept as failed, and says why."""
    with Session(database) as db, db.begin():
        db.execute(update(RolloutSession).where(RolloutSession.id == fence.session_id).values(attempt=2))
    now_held = Fence(fence.session_id, 2, fence.key_hash)

    async def act(recorder: Recorder) -> None:
        await recorder.intend([intent(fence, "cmp-a"), intent(fence, "cmp-b")])
        answered = {"outcome": "answered", "parsed": {}}
        counts = await asyncio.gather(
            recorder.settle(fence, "cmp-a", answered, turns=1, tokens=5),
            recorder.settle(now_held, "cmp-b", answered, turns=1, tokens=2),
        )
        assert counts == [False, True]

    recording(database_url, act)
    rows = {row.id: row for row in completions(database)}
    assert (rows["cmp-a"].outcome, (rows["cmp-a"].error or {})["code"]) == ("failed", "session_ended")
    assert rows["cmp-b"].outcome == "answered"
    assert charges(database, fence) == (1, 2)


def test_a_record_that_is_refused_stands_alone(database: Engine, database_url: str, fence: Fence) -> None:
    """What the database will not take does not take its neighbours in the batch with it."""

    async def act(recorder: Recorder) -> None:
        stranger = Fence("ses-of-nobody", 1, b"")
        results = await asyncio.gather(
            recorder.intend([intent(stranger, "cmp-a")]),
            recorder.intend([intent(fence, "cmp-b")]),
            return_exceptions=True,
        )
        assert isinstance(results[0], NodeError)
        assert results[1] is None

    recording(database_url, act)
    assert [row.id for row in completions(database)] == ["cmp-b"]


def test_a_note_goes_with_what_is_next(database: Engine, database_url: str, fence: Fence) -> None:
    """A delivery waits for company, and on the way down it is written without; a flag of the same row is kept too."""

    async def act(recorder: Recorder) -> None:
        await recorder.intend([intent(fence, "cmp-a"), intent(fence, "cmp-b")])
        recorder.delivered("cmp-a")
        await asyncio.sleep(0.1)
        assert not any(row.delivered for row in await asyncio.to_thread(completions, database))
        await recorder.flag("cmp-a", "forgotten")
        (first, *_) = await asyncio.to_thread(completions, database)
        assert (first.delivered, first.flags[-1]) == (True, "forgotten")
        recorder.delivered("cmp-b")

    recording(database_url, act, note=60.0)
    assert all(row.delivered for row in completions(database))


def test_plans_do_not_read_whole_tables(database_url: str, fence: Fence) -> None:
    """A statement that was planned over empty tables finds its rows by their keys all the same."""
    ends = {"id": "cmp-a", "outcome": "answered", "parsed": {}, "session_id": fence.session_id, "attempt": 1}
    rows = {"delivered": [{"id": "cmp-a"}], "settle": [{**ends, "turns": 1, "tokens": 1}]}
    kinds = tuple(sorted(rows))
    values = [array for kind in kinds for array in arguments(kind, rows[kind])]

    async def main() -> str:
        database = Database(database_url, 1)
        plan = await database.patiently(f"EXPLAIN {statement(kinds)}", values, 5.0)
        await database.close()
        return "\n".join(row[0] for row in plan)

    plan = asyncio.run(main())
    assert "Index Scan using completions_pkey" in plan
    assert "Seq Scan" not in plan, plan
