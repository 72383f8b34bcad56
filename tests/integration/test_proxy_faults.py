"""What a harness meets, and what the record says, when an engine, a client or the database goes away."""

from __future__ import annotations

import json
import threading
import time

import httpx
import openai
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from polar.proxy.limits import Limits
from tests.integration.rig import KEY, client, completions, free_port, ids, open_session, serve, until

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("stream", [False, True])
def test_engine_down(database: Engine, database_url: str, stream: bool) -> None:
    """An engine that stays away is waited for, then reported in OpenAI's shape and on the record."""
    open_session(database, f"http://127.0.0.1:{free_port()}")
    begun = time.monotonic()
    with serve(database_url, Limits(retry=1.0)) as proxy, pytest.raises(openai.InternalServerError) as caught:
        user = {"role": "user", "content": "hello"}
        client(proxy).chat.completions.create(model="m", messages=[user], stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_down")
    assert time.monotonic() - begun > 0.5
    (row,) = completions(database)
    assert (row.outcome, (row.error or {})["code"]) == ("failed", "engine_down")


def test_engine_down_after_the_first_byte(database: Engine, proxy: str) -> None:
    """A stream that has begun ends in an error event and a reset, never as if it were whole."""
    open_session(database, f"http://127.0.0.1:{free_port()}")
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    seen = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}) as reply,
    ):
        for piece in reply.iter_bytes():
            seen += piece
    assert json.loads(seen.rpartition(b"data: ")[2])["error"]["code"] == "engine_down"


@pytest.mark.parametrize("stream", [False, True])
def test_hang_up(database: Engine, proxy: str, session_id: str, stream: bool) -> None:
    """A harness that hangs up ends the engine's work within a second, and the partial output is on record."""
    body = {"model": "m", "messages": [{"role": "user", "content": "count slowly"}], "stream": stream}
    try:
        with httpx.stream(
            "POST", f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}, timeout=0.7
        ) as reply:
            next(reply.iter_bytes())
    except httpx.ReadTimeout:
        assert not stream
    row = until(lambda: [row for row in completions(database) if row.outcome != "asked"], 2.0)[0]
    assert (row.outcome, row.finish_reason, row.delivered) == ("aborted", "abort", False)
    assert 0 < len(ids(row.output_ids)) < 60
    assert len(row.logprobs) == len(row.output_ids)


def test_one_bad_record_spares_its_neighbours(database: Engine, proxy: str, session_id: str) -> None:
    """A record that the database refuses fails alone, though it shared a transaction."""
    with Session(database) as db, db.begin():
        db.execute(text("ALTER TABLE completions ADD CONSTRAINT no_bad CHECK (model_requested <> 'bad')"))
    found: list[int] = []

    def ask(model: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": f"hello {model}"}]}
        found.append(httpx.post(f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}).status_code)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("bad", "a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [200, 200, 200, 503]


def test_database_drops_its_connections(database: Engine, proxy: str, session_id: str) -> None:
    """A database that restarts costs no call: reads and records are done again."""
    ask = client(proxy).chat.completions.create
    ask(model="m", messages=[{"role": "user", "content": "hello"}])
    with Session(database) as db:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        db.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
    database.dispose()
    ask(model="m", messages=[{"role": "user", "content": "hello again"}])
    assert [row.outcome for row in completions(database)] == ["answered", "answered"]
