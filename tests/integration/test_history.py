"""The task's history policy and the lane's renderer, end to end: the official client, a scripted engine, the rows."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from polar.models import Lane, Task
from polar.proxy import pool
from polar.renderers import for_folder
from polar.stages.calls import load_calls
from tests.integration.rig import MODEL, client, completions, ids, open_session, serve

pytestmark = pytest.mark.integration


@pytest.fixture
def proxy(database_url: str) -> Iterator[str]:
    """A proxy of this process, whose links are made anew."""
    with serve(database_url) as url:
        yield url


def two_turns(url: str) -> None:
    """A user's question, its answer, and a second question."""
    asked = [{"role": "user", "content": "How is the weather?"}]
    said = client(url).chat.completions.create(model="m", messages=asked).choices[0].message  # type: ignore[arg-type]
    answer = {"role": "assistant", "content": said.content}
    more = {"role": "user", "content": "Thanks."}
    client(url).chat.completions.create(model="m", messages=[*asked, answer, more])  # type: ignore[list-item]


@pytest.mark.parametrize(("history", "reason"), [("sampled", "exact"), ("tool_cycle", "template_history")])
def test_history_is_carried_and_recorded(
    database: Engine, proxy: str, engine_url: str, history: str, reason: str
) -> None:
    """The policy of the task decides where a call stands, and every completion and call says which it was."""
    session_id = open_session(database, engine_url, history=history)
    two_turns(proxy)
    first, second = completions(database)
    assert (second.parent_reason, second.parent_id) == (reason, first.id if reason == "exact" else None)
    assert [row.parsed["history"] for row in (first, second)] == [history, history]
    with Session(database) as db:
        calls = load_calls(db, session_id, 1)
    assert [call.metadata["history"] for call in calls] == [history, history]
    assert [len(call.prompt_ids) for call in calls] == [first.prompt_len, second.prompt_len]


def test_a_lane_with_a_family_of_the_library(database: Engine, proxy: str, engine_url: str) -> None:
    """A lane's engine may name a family: its layout is what the engine is sent."""
    open_session(database, engine_url)
    spec = {"base_url": engine_url, "tokenizer": str(MODEL), "renderer": "qwen3"}
    with Session(database) as db, db.begin():
        db.execute(update(Lane).values(engine=spec))
    two_turns(proxy)
    first, second = completions(database)
    renderer = for_folder(MODEL, "qwen3")
    assert second.parent_id == first.id
    assert "<|im_start|>user\nThanks.<|im_end|>" in renderer.decode(ids(second.suffix_ids))
    assert first.prompt_verified and second.prompt_verified


def test_strict_tasks_want_a_renderer_that_was_tried(
    database: Engine, proxy: str, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renderer that failed its self-test serves strict tasks nothing but the case; other tasks it serves."""
    monkeypatch.setattr(pool, "doubt_of", lambda _: "renderer x failed its self-test: after user assistant")
    open_session(database, engine_url, strict=True)
    with pytest.raises(openai.APIStatusError, match="after user assistant"):
        two_turns(proxy)
    assert completions(database)[0].error["code"] == "renderer_refused"  # type: ignore[index]
    with Session(database) as db, db.begin():
        db.execute(update(Task).values(spec=Task.spec.op("||")({"strict": False})))
    client(proxy).chat.completions.create(model="m", messages=[{"role": "user", "content": "How is the weather?"}])
    assert completions(database)[-1].outcome == "answered"
