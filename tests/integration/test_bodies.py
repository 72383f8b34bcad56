"""What a session's requests cost in the database, and that each can be read from wherever it was written."""

from __future__ import annotations

import httpx
import orjson
import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar.bodies import request_of
from polar.stages.calls import load_calls
from tests.integration.rig import KEY, completions, serve

pytestmark = pytest.mark.integration
TURNS = 12


def test_requests_grow_with_what_is_new(database: Engine, database_url: str, session_id: str) -> None:
    """Twelve turns over 40 kB of history are stored in little more than the first, through two processes in turn."""
    system = {"role": "system", "content": "".join(f"{number:x} " for number in range(7_000))}
    messages = [system, {"role": "user", "content": "begin"}]
    bodies = []
    with serve(database_url) as one, serve(database_url) as other:
        for turn in range(TURNS):
            body = {"model": "m", "messages": messages, "max_tokens": 8}
            bodies.append(body)
            url = f"{(one, other)[turn % 2]}/v1/chat/completions"
            answer = httpx.post(url, json=body, headers={"api-key": KEY}, timeout=30).json()["choices"][0]["message"]
            messages = [*messages, answer, {"role": "user", "content": f"go on {turn}"}]
    rows = completions(database)
    assert len(rows[0].request) > 5_000
    assert sum(len(row.request) for row in rows[1:]) < len(rows[0].request) / 2
    assert [row.parsed.get("base") for row in rows] == [None, *(row.id for row in rows[:-1])]
    with Session(database) as db:
        assert [orjson.loads(request_of(db, row.id)) for row in rows] == bodies
        calls = load_calls(db, session_id, 1)
    assert len(calls[-1].request["messages"]) == len(bodies[-1]["messages"])
