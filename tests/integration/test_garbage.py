"""An engine that answers nonsense: the harness is told, the record says so, and nothing of it can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from sqlalchemy import Engine, text

from tests.fakes.garbage import KINDS, Garbage, garbage
from tests.integration.rig import KEY, completions, open_session

pytestmark = pytest.mark.integration
CODES = {"engine_contract", "engine_cut", "no_token_ids", "engine_altered_prompt"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def engine(database: Engine, engine_url: str) -> Iterator[Garbage]:
    """The engine of the session's lane."""
    with garbage(real=engine_url) as made:
        open_session(database, made.url)
        yield made


def ask(proxy: str, stream: bool) -> tuple[int, str]:
    """Status and body of one call; a stream may be reset, upon which no client takes it for an answer."""
    url, text, body = f"{proxy}/v1/chat/completions", "", BODY | {"stream": stream}
    with (
        httpx.stream("POST", url, json=body, headers=HEADERS, timeout=20) as answer,
        suppress(httpx.RemoteProtocolError),
    ):
        for part in answer.iter_text():
            text += part
    return answer.status_code, text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_nonsense_is_refused_and_kept_out(
    database: Engine, database_url: str, proxy: str, engine: Garbage, engine_url: str, stream: bool
) -> None:
    """Every kind of nonsense ends in an error, a failed completion and no token of it; then the engine is well again
    and the session goes on."""
    for kind in KINDS:
        engine.kind = kind
        if kind == "hung up":
            continue  # nothing had begun, so that is tried again: see below
        status, said = ask(proxy, stream)
        assert status >= 400 or stream, (kind, said)
        assert "error" in said and "[DONE]" not in said, (kind, said)
    rows = completions(database)
    assert len(rows) == len(KINDS) - 1
    for kind, row in zip(KINDS, rows, strict=False):
        assert (row.outcome, row.output_ids, row.answer) == ("failed", b"", None), kind
        assert row.error is not None and row.error["code"] in CODES, (kind, row.error)
    with database.begin() as db:
        mended = text("UPDATE lanes SET engine = jsonb_build_object('base_url', cast(:url AS text))")
        db.execute(mended, {"url": engine_url})
    status, said = ask(proxy, stream)
    assert status == 200 and "error" not in said
    assert completions(database)[-1].outcome == "answered"


def test_an_engine_that_hangs_up_is_asked_again(database: Engine, proxy: str, engine: Garbage) -> None:
    """A connection that is closed before an answer began is tried again within the budget, then told as an error."""
    engine.kind = "hung up"
    answer = httpx.post(f"{proxy}/v1/chat/completions", json=BODY, headers=HEADERS, timeout=20)
    assert answer.status_code >= 500
    assert len(engine.told) > 1
    assert completions(database)[0].outcome == "failed"
