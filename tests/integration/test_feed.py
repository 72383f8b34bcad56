"""The results feed on real Postgres: nothing is passed by, however ends are committed; pages, consumers and formats."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import numpy as np
import orjson
import pyarrow
import pytest
import zstandard
from flask.testing import FlaskClient
from sqlalchemy import Engine, delete, event, select, update

from polar import keys, lifecycle, queries
from polar.db import connect, transaction
from polar.delivery import feed
from polar.models import Consumer, Feed, RolloutSession, Task, TraceRow, TrajectoryRow
from polar.sweep import sweep
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task

ARROW = {"Accept": "application/vnd.apache.arrow.stream"}
LINES = {"Accept": "application/x-ndjson"}


def submit(database: Engine, task_id: str = "task-1", **changes: Any) -> list[str]:
    with transaction(database) as db:
        row = lifecycle.submit(db, task(task_id=task_id, **changes))
        return [each.id for each in queries.sessions_of(db, row.id)]


def end(database: Engine, session_id: str) -> None:
    with transaction(database) as db:
        lifecycle.cancel(db, queries.session(db, session_id))


def ended(database: Engine, count: int, task_id: str = "task-1", **changes: Any) -> list[str]:
    """A task with so many sessions, ended one after the other."""
    ids = submit(database, task_id, num_samples=count, **changes)
    for session_id in ids:
        end(database, session_id)
    return ids


def traced(database: Engine, session_id: str) -> None:
    """Give a session a trajectory of one trace."""
    body = {"prompt_messages": [], "response_messages": [], "tools": None, "finish_reason": "stop", "metadata": {}}
    with transaction(database) as db:
        db.add(TrajectoryRow(session_id=session_id, attempt=1, builder="per_request"))
        db.flush()
        db.add(
            TraceRow(
                session_id=session_id,
                number=0,
                prompt_ids=np.array([1, 2, 3], "<i4").tobytes(),
                response_ids=np.array([4, 5], "<i4").tobytes(),
                loss_mask=np.array([1, 0], "u1").tobytes(),
                logprobs=np.array([-0.5, 0.0], "<f4").tobytes(),
                reward=0.25,
                trainable=True,
                fidelity="exact",
                certificate={"flags": []},
                body=zstandard.compress(orjson.dumps(body)),
            )
        )


class Reader(threading.Thread):
    """Pages through the feed all the time, in pages of changing length, until it is told to stop and finds no more."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__()
        self.database = connect(url, pool_size=1)
        self.random = random.Random(seed)
        self.seen: list[feed.Place] = []
        self.stop = threading.Event()

    def run(self) -> None:
        cursor = 0
        while True:
            last_look = self.stop.is_set()
            page = feed.page(self.database, cursor, self.random.randint(1, 7))
            self.seen += page.places
            cursor = page.next
            if not page.places:
                if last_look:
                    break
                time.sleep(0.002)
        self.database.dispose()


def test_no_session_is_passed_by(database: Engine, database_url: str) -> None:
    """Many ends commit at once, some after a second, some at the second try; three readers page all the time.

    Each reader sees each session exactly once, in the same order, with numbers that have no gap."""
    tasks = [submit(database, f"task-{n}", num_samples=3) for n in range(40)]
    pool = connect(database_url, pool_size=24)

    def worker(seed: int, mine: list[list[str]]) -> None:
        chance = random.Random(seed)
        for ids in mine:
            for session_id in ids:
                for wrecked in [True] * (chance.random() < 0.2) + [False]:
                    try:
                        with transaction(pool) as db:
                            lifecycle.cancel(db, queries.session(db, session_id))
                            time.sleep(chance.choice([0.0, 0.0, 0.001, 0.01, 0.3]))
                            if wrecked:
                                raise InterruptedError
                    except InterruptedError:
                        continue

    readers = [Reader(database_url, seed) for seed in range(3)]
    workers = [threading.Thread(target=worker, args=(n, tasks[n::20])) for n in range(20)]
    for thread in [*readers, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    for reader in readers:
        reader.stop.set()
        reader.join()
    pool.dispose()
    wanted = {session_id for ids in tasks for session_id in ids}
    for reader in readers:
        assert [place.number for place in reader.seen] == list(range(1, len(wanted) + 1))
        assert {place.session_id for place in reader.seen} == wanted
        assert reader.seen == readers[0].seen


def test_an_end_that_is_not_committed_holds_nobody_up(database: Engine, database_url: str) -> None:
    """A session whose end commits late comes later; until then others go by, and the reader gets both."""
    slow, quick = submit(database, "slow")[0], submit(database, "quick")[0]
    other = connect(database_url, pool_size=1)
    with transaction(other) as db:
        lifecycle.cancel(db, queries.session(db, slow))
        end(database, quick)
        first = feed.page(database, 0, 10)
        assert [place.session_id for place in first.places] == [quick]
    other.dispose()
    assert [place.session_id for place in feed.page(database, first.next, 10).places] == [slow]


@pytest.mark.parametrize("moment", ["before_cursor_execute", "after_cursor_execute"])
def test_what_is_numbered_while_a_page_is_read_comes_once(database: Engine, database_url: str, moment: str) -> None:
    """A number that is given right before or after the page's own statement is on the next page, and only there."""
    first, second = submit(database, num_samples=2)
    other = connect(database_url, pool_size=1)
    end(other, first)

    def meanwhile(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "feed_number >" in statement and feed.number_ended(other) == 0:
            end(other, second)
            feed.number_ended(other)

    event.listen(database, moment, meanwhile)
    page = feed.page(database, 0, 10)
    event.remove(database, moment, meanwhile)
    assert [place.session_id for place in page.places] == [first]
    assert [place.session_id for place in feed.page(database, page.next, 10).places] == [second]
    other.dispose()


def test_a_locked_session_does_not_stop_the_numbering(database: Engine, database_url: str) -> None:
    """Whoever holds a row of an ended session delays that one alone, and no number is lost to it."""
    ids = ended(database, 3)
    other = connect(database_url, pool_size=1)
    with transaction(other) as db:
        db.scalars(select(RolloutSession).where(RolloutSession.id == ids[1]).with_for_update()).one()
        assert [place.session_id for place in feed.page(database, 0, 10).places] == [ids[0], ids[2]]
    other.dispose()
    assert [(place.number, place.session_id) for place in feed.page(database, 2, 10).places] == [(3, ids[1])]


def test_the_sweeper_numbers_and_numbers_are_not_used_again(database: Engine) -> None:
    """Without any reader the sweeper gives numbers; after rows were deleted the next number is a new one."""
    ended(database, 2)
    assert sweep(database, FakeDispatcher())["numbered"] == 2
    with transaction(database) as db:
        db.execute(delete(Task))
    (later,) = ended(database, 1, "task-2")
    assert [(place.number, place.session_id) for place in feed.page(database, 2, 10).places] == [(3, later)]


def test_pages_are_resumed_by_cursor(api: FlaskClient, database: Engine) -> None:
    """Page after page gives every result once, in order, and an empty page gives the same cursor back."""
    ids = ended(database, 5)
    seen, after = [], "0"
    for length in (2, 2, 1, 0):
        page = api.get(f"/rollout/results?after={after}&limit=2&view=summary").json
        assert len(page["results"]) == length
        assert [each["cursor"] for each in page["results"]][-1:] in ([], [page["next"]])
        seen += [each["session_id"] for each in page["results"]]
        after = page["next"]
    assert (seen, after) == (ids, "5")
    assert api.get("/rollout/results?after=5").json == {"results": [], "next": "5"}


def test_filters(api: FlaskClient, database: Engine) -> None:
    """`group` is metadata.group_id as text, `task_id` the task's name; `next` passes what was looked at."""
    red = ended(database, 2, "a", metadata={"group_id": "red"})
    seven = ended(database, 1, "b", metadata={"group_id": 7})
    ended(database, 2, "c")
    shown = api.get("/rollout/results?group=red").json
    assert ([each["session_id"] for each in shown["results"]], shown["next"]) == (red, "5")
    assert [each["session_id"] for each in api.get("/rollout/results?group=7").json["results"]] == seven
    assert [each["session_id"] for each in api.get("/rollout/results?task_id=b").json["results"]] == seven
    assert api.get("/rollout/results?group=red&limit=1").json["next"] == "1"
    assert api.get("/rollout/results?group=blue").json == {"results": [], "next": "5"}


def test_a_long_poll_answers_when_a_session_ends(api: FlaskClient, database: Engine) -> None:
    """`wait` holds the request until there is a result, and no longer; without one it is given up in time."""
    (session_id,) = submit(database)
    began = time.monotonic()
    assert api.get("/rollout/results?wait=0.5").json["results"] == []
    assert time.monotonic() - began >= 0.5
    timer = threading.Timer(0.5, end, (database, session_id))
    timer.start()
    found = api.get("/rollout/results?wait=30").json
    timer.join()
    assert [each["session_id"] for each in found["results"]] == [session_id]
    assert time.monotonic() - began < 15


def test_a_consumer_goes_on_from_what_it_acknowledged(api: FlaskClient, database: Engine) -> None:
    """Unacknowledged results come again; an acknowledged cursor stays, also against a late repeat of an earlier one."""
    ids = ended(database, 3)

    def read() -> list[str]:
        page = api.get("/rollout/results?consumer=trainer&view=summary").json
        return [each["session_id"] for each in page["results"]]

    def acknowledge(**body: Any) -> Any:
        return api.post("/rollout/results/ack", json={"consumer": "trainer", **body}).json

    assert (read(), read()) == (ids, ids)
    assert acknowledge(cursor="2") == {"consumer": "trainer", "cursor": "2"}
    assert read() == ids[2:]
    assert acknowledge(cursor=1)["cursor"] == "2"
    assert acknowledge(cursor="3")["cursor"] == "3"
    assert read() == []
    assert api.get("/rollout/results?consumer=trainer&after=1").json["results"][0]["session_id"] == ids[1]
    assert len(api.get("/rollout/results?consumer=another").json["results"]) == 3
    assert acknowledge(cursor="1", rewind=True)["cursor"] == "1"
    assert read() == ids[1:]


def test_a_cursor_of_another_database_is_refused(api: FlaskClient, database: Engine) -> None:
    """A cursor past the end would wait for ever, so it is an error: of a page, of an acknowledgement, of a consumer."""
    ended(database, 2)
    api.get("/rollout/results")
    answer = api.get("/rollout/results?after=3")
    assert (answer.status_code, answer.json["errors"][0]["field"]) == (422, "after")
    assert api.post("/rollout/results/ack", json={"consumer": "a", "cursor": "3"}).status_code == 422
    api.post("/rollout/results/ack", json={"consumer": "a", "cursor": "2"})
    with transaction(database) as db:
        db.execute(update(Feed).values(last=1))
    answer = api.get("/rollout/results?consumer=a")
    assert (answer.status_code, answer.json["code"]) == (409, "cursor_past_end")


@pytest.mark.parametrize(
    ("query", "field"),
    [("after=x", "after"), ("after=-1", "after"), ("limit=0", "limit"), ("limit=nan", "limit"), ("view=x", "view")]
    + [("wait=-1", "wait"), ("wait=inf", "wait"), ("consumer=a/b", "consumer"), ("after=" + "9" * 30, "after")],
)
def test_a_wrong_query_is_named(api: FlaskClient, query: str, field: str) -> None:
    """Each is a 422 that names the parameter."""
    answer = api.get(f"/rollout/results?{query}")
    assert (answer.status_code, answer.json["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize(
    "body", [{}, {"consumer": "a"}, {"consumer": "a", "cursor": "x"}, {"consumer": "", "cursor": 1}]
)
def test_a_wrong_acknowledgement_is_refused(api: FlaskClient, database: Engine, body: dict[str, Any]) -> None:
    """And no consumer comes of it."""
    assert api.post("/rollout/results/ack", json=body).status_code == 422
    with transaction(database) as db:
        assert db.scalars(select(Consumer)).all() == []


def test_json_lines_and_views(api: FlaskClient, database: Engine) -> None:
    """A result a line with its own cursor, the page's in a header; `summary` counts tokens instead of listing them."""
    first, second = submit(database, num_samples=2)
    traced(database, first)
    end(database, first)
    end(database, second)
    answer = api.get("/rollout/results", headers=LINES)
    assert (answer.mimetype, answer.headers["X-Polar-Next"]) == ("application/x-ndjson", "2")
    lines = [orjson.loads(line) for line in answer.data.splitlines()]
    assert lines == api.get("/rollout/results").json["results"]
    assert [(line["session_id"], line["cursor"]) for line in lines] == [(first, "1"), (second, "2")]
    (trace,) = lines[0]["trajectory"]["traces"]
    assert (trace["prompt_ids"], trace["response_ids"], trace["loss_mask"]) == ([1, 2, 3], [4, 5], [1, 0])
    short = api.get("/rollout/results?view=summary").json["results"][0]["trajectory"]["traces"][0]
    assert "prompt_ids" not in short and (short["prompt_tokens"], short["sampled_tokens"]) == (3, 1)


def test_arrow(api: FlaskClient, database: Engine) -> None:
    """One row a trace, with the stored tokens; a session without a trace is there too."""
    ids = submit(database, num_samples=6, metadata={"group_id": "g"})
    traced(database, ids[0])
    for session_id in ids:
        end(database, session_id)
    answer = api.get("/rollout/results", headers=ARROW)
    assert answer.headers["X-Polar-Next"] == "6"
    table = pyarrow.ipc.open_stream(answer.data).read_all()
    first, second, *_ = rows = table.to_pylist()
    assert [row["session_id"] for row in rows] == ids
    assert (first["prompt_ids"], first["response_ids"], first["loss_mask"]) == ([1, 2, 3], [4, 5], [1, 0])
    assert (first["logprobs"], first["reward"], first["trainable"], first["cursor"]) == ([-0.5, 0.0], 0.25, True, 1)
    assert (first["group_id"], first["status"], first["fidelity"], first["trace"]) == ("g", "ERROR", "exact", 0)
    assert (second["prompt_ids"], second["trace"], second["error"]) == (None, None, "cancelled on request")
    short = pyarrow.ipc.open_stream(api.get("/rollout/results?view=summary", headers=ARROW).data).read_all()
    assert "prompt_ids" not in short.column_names and short.to_pylist()[0]["prompt_tokens"] == 3


def test_an_empty_arrow_page_is_a_table(api: FlaskClient) -> None:
    """With the same columns and no rows."""
    table = pyarrow.ipc.open_stream(api.get("/rollout/results", headers=ARROW).data).read_all()
    assert (table.num_rows, "response_ids" in table.column_names) == (0, True)


def test_formats_that_cannot_be_had(api: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """406 names the formats, or what must be installed; whoever accepts another as well gets that."""
    assert api.get("/rollout/results", headers={"Accept": "*/*"}).mimetype == "application/json"
    assert "x-ndjson" in api.get("/rollout/results", headers={"Accept": "text/html"}).json["detail"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = api.get("/rollout/results", headers=ARROW)
    assert (answer.status_code, answer.json["code"]) == (406, "arrow_not_installed")
    assert "polar-rollout[arrow]" in answer.json["detail"]
    either = {"Accept": f"{ARROW['Accept']}, application/x-ndjson;q=0.5"}
    assert api.get("/rollout/results", headers=either).mimetype == "application/x-ndjson"


def test_scopes(api: FlaskClient, database: Engine) -> None:
    """Reading takes `read`; moving a cursor takes `submit`."""
    with transaction(database) as db:
        reader = keys.make(db, "reader", ["read"])
    api.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {reader}"
    assert api.get("/rollout/results").status_code == 200
    assert api.post("/rollout/results/ack", json={"consumer": "a", "cursor": "0"}).status_code == 403
