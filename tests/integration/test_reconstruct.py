"""The stage that makes traces of calls, on rows that are still being written."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from polar.bodies import pack
from polar.lifecycle import Stage
from polar.models import Completion, TraceRow, now
from polar.stages.reconstruct import reconstruct
from tests.fakes.jobs import claimed

pytestmark = pytest.mark.integration
RECORD: dict[str, Any] = {
    "outcome": "answered",
    "parent_reason": "root",
    "dialect": "openai_chat",
    "role": "main",
    "model_requested": "m",
    "request": pack(b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'),
    "parsed": {},
    "context_len": 1,
    "prompt_len": 1,
    "suffix_ids": b"\x05\0\0\0",
    "output_ids": b"\x07\0\0\0",
    "logprobs": b"\0\0\0\0",
    "policy_versions": [],
    "flags": [],
    "engine": {},
    "finish_reason": "stop",
    "prompt_verified": True,
    "delivered": False,
}


@pytest.mark.parametrize(("age", "flags"), [(0.0, []), (60.0, ["ghost"])])
def test_a_note_on_its_way(database: Engine, tmp_path: Path, age: float, flags: list[str]) -> None:
    """An agent ends with its last answer: the note that it has it counts if it is a moment late, and no later."""
    (job,) = claimed(database, tmp_path, Stage.RECONSTRUCT)
    moment = now() - timedelta(seconds=age)
    with Session(database) as db, db.begin():
        own = {"session_id": job.session.id, "attempt": job.session.attempt}
        db.add(Completion(id="cmp-a", **own, **RECORD, requested_at=moment, finished_at=moment))

    def note() -> None:
        with Session(database) as db, db.begin():
            db.execute(update(Completion).values(delivered=True))

    late = threading.Timer(0.3, note)
    late.start()
    try:
        reconstruct(job)
    finally:
        late.join()
    with Session(database) as db:
        assert [trace.certificate["flags"] for trace in db.query(TraceRow)] == [flags]
