"""Everything that can go wrong, in each dialect: the status and the code that its clients act on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.dialects import DIALECTS
from polar.models import Lane, RolloutSession
from polar.proxy.limits import Limits
from tests.integration.rig import KEY, MODEL, completions, free_port, open_session, serve, until

pytestmark = pytest.mark.integration
TEXT = "count slowly, please"
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai_chat": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": TEXT}]}),
    "openai_responses": ("/v1/responses", {"model": "m", "input": TEXT}),
    "anthropic_messages": (
        "/v1/messages",
        {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": TEXT}]},
    ),
    "google_generate": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": TEXT}]}]},
    ),
}
HISTORY = {
    "openai_chat": "messages",
    "openai_responses": "input",
    "anthropic_messages": "messages",
    "google_generate": "contents",
}
"""The field that no dialect can do without."""
STATUSES = {("anthropic_messages", 503): 529, ("google_generate", 502): 500}
"""Where a provider says it by another status."""
KINDS: dict[str, dict[int, str]] = {
    "openai_chat": {},
    "openai_responses": {},
    "anthropic_messages": {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        502: "api_error",
        504: "timeout_error",
        529: "overloaded_error",
    },
    "google_generate": {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
    },
}
LIMITS = Limits(retry=0.5, keepalive=0.3)

assert set(CALLS) == set(DIALECTS)


@pytest.fixture(params=sorted(CALLS))
def dialect(request: pytest.FixtureRequest) -> str:
    """Each dialect."""
    return str(request.param)


def check(dialect: str, reply: httpx.Response, status: int, code: str, *words: str) -> dict[str, Any]:
    """The error is of this status and in the dialect's own shape; its body."""
    status = STATUSES.get((dialect, status), status)
    assert reply.status_code == status, reply.text
    body: dict[str, Any] = reply.json()
    error = body["error"]
    if dialect.startswith("openai"):
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == code
    elif dialect == "anthropic_messages":
        assert (body["type"], error["type"]) == ("error", KINDS[dialect][status])
    else:
        assert (error["code"], error["status"]) == (status, KINDS[dialect][status])
    for word in words:
        assert word in error["message"], error["message"]
    return body


def ask(proxy: str, dialect: str, *, key: str = KEY, content: bytes | None = None, **changes: Any) -> httpx.Response:
    """One call; `None` takes a field out."""
    path, body = CALLS[dialect]
    body = {name: value for name, value in {**body, **changes}.items() if value is not None}
    data = json.dumps(body).encode() if content is None else content
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    return httpx.post(proxy + path, content=data, headers=headers, timeout=30)


@contextmanager
def engine(status: int = 200, *, seconds: float = 0.0, context_length: int = 100_000) -> Iterator[str]:
    """A server that describes itself as an engine and answers each prompt with this status, or after this time."""

    async def info(request: Request) -> Response:
        return JSONResponse({"model_path": str(MODEL), "context_length": context_length, "data": []})

    async def generate(request: Request) -> Response:
        await asyncio.sleep(seconds)
        return JSONResponse({"error": {"message": "not now", "code": status}}, status)

    paths = [Route(path, info) for path in ("/model_info", "/v1/models", "/server_info")]
    app = Starlette(
        routes=[*paths, *(Route(path, generate, methods=["POST"]) for path in ("/generate", "/abort_request"))]
    )
    config = uvicorn.Config(app, port=free_port(), log_level="error")
    server = uvicorn.Server(config)
    thread = Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{config.port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(15)


def test_invalid_json(dialect: str, proxy: str, session_id: str) -> None:
    """Half a body."""
    check(dialect, ask(proxy, dialect, content=b'{"model": '), 400, "invalid_json", "not valid JSON")


def test_missing_field(dialect: str, proxy: str, session_id: str) -> None:
    """The field is named."""
    name = HISTORY[dialect]
    check(dialect, ask(proxy, dialect, **{name: None}), 400, "invalid_request", name)


def test_wrong_type(dialect: str, proxy: str, session_id: str) -> None:
    """So is one of the wrong type."""
    name = HISTORY[dialect]
    check(dialect, ask(proxy, dialect, **{name: 7}), 400, "invalid_request", name)


def test_unknown_model(dialect: str, database: Engine, proxy: str, engine_url: str) -> None:
    """Where the task serves its own model alone, another one is not found; else any name is served."""
    open_session(database, engine_url, agent={"model_name": "policy", "other_models": "refuse"})
    check(dialect, ask(proxy, dialect), 404, "model_not_found", "policy")


def test_unknown_key(dialect: str, proxy: str, session_id: str) -> None:
    """A key that no session has."""
    check(dialect, ask(proxy, dialect, key="wrong"), 401, "invalid_api_key")


def test_ended_session(dialect: str, database: Engine, proxy: str, session_id: str) -> None:
    """The key of a session that moved on."""
    with Session(database) as db, db.begin():
        db.execute(update(RolloutSession).values(state="completed"))
    check(dialect, ask(proxy, dialect), 401, "invalid_api_key", "ended")


def test_context_length(dialect: str, database: Engine, database_url: str) -> None:
    """A prompt that does not fit is refused in the words by which harnesses know to compact."""
    with engine(context_length=20) as url, serve(database_url, LIMITS) as proxy:
        open_session(database, url)
        words = {
            "openai_chat": "maximum context length is 20 tokens",
            "openai_responses": "maximum context length is 20 tokens",
            "anthropic_messages": "prompt is too long: ",
            "google_generate": "exceeds the maximum number of tokens allowed (20)",
        }
        check(dialect, ask(proxy, dialect), 400, "context_length_exceeded", words[dialect])


def test_rate_limit(dialect: str, database: Engine, database_url: str) -> None:
    """An engine that keeps saying 429 makes one, with the time after which to come back."""
    with engine(429) as url, serve(database_url, LIMITS) as proxy:
        open_session(database, url)
        reply = ask(proxy, dialect)
    check(dialect, reply, 429, "rate_limit_exceeded")
    assert int(reply.headers["retry-after"]) > 0


def test_engine_down(dialect: str, database: Engine, database_url: str) -> None:
    """Nothing listens there."""
    open_session(database, f"http://127.0.0.1:{free_port()}")
    with serve(database_url, LIMITS) as proxy:
        reply = ask(proxy, dialect)
    check(dialect, reply, 503, "engine_down")
    assert int(reply.headers["retry-after"]) > 0


def test_engine_broken(dialect: str, database: Engine, database_url: str) -> None:
    """An engine that fails on the prompt."""
    with engine(500) as url, serve(database_url, LIMITS) as proxy:
        open_session(database, url)
        check(dialect, ask(proxy, dialect), 502, "engine_error", "not now")


def test_engine_timeout(dialect: str, database: Engine, database_url: str) -> None:
    """An engine that does not answer in its time."""
    with engine(seconds=20) as url, serve(database_url, Limits(retry=0.5, abort_grace=0.1)) as proxy:
        open_session(database, url)
        with Session(database) as db, db.begin():
            db.execute(update(Lane).values(engine={"base_url": url, "timeout_seconds": 0.5}))
        check(dialect, ask(proxy, dialect), 504, "engine_timeout")


def test_out_of_turns(dialect: str, database: Engine, proxy: str, engine_url: str) -> None:
    """A session that has made its calls."""
    open_session(database, engine_url, max_turns=1)
    with Session(database) as db, db.begin():
        db.execute(update(RolloutSession).values(turns=1))
    check(dialect, ask(proxy, dialect), 403, "max_turns", "1 model calls")


def test_out_of_tokens(dialect: str, database: Engine, proxy: str, engine_url: str) -> None:
    """A session that has sampled its tokens."""
    open_session(database, engine_url, max_session_tokens=5)
    with Session(database) as db, db.begin():
        db.execute(update(RolloutSession).values(sampled_tokens=5))
    check(dialect, ask(proxy, dialect), 403, "max_session_tokens", "5 tokens")


def test_hang_up(dialect: str, database: Engine, proxy: str, session_id: str) -> None:
    """A client that goes away in mid-stream ends the engine's work within a second, and the partial is on record."""
    path, body = CALLS[dialect]
    if dialect == "google_generate":
        path = path.replace("generateContent", "streamGenerateContent?alt=sse")
    else:
        body = {**body, "stream": True}
    headers = {"authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"}
    with httpx.stream("POST", proxy + path, json=body, headers=headers) as reply:
        seen = ""
        for text in reply.iter_text():
            seen += text
            if seen.count("data:") > 12:
                break
    begun = time.monotonic()
    row = until(lambda: [row for row in completions(database) if row.outcome != "asked"], 3.0)[0]
    assert time.monotonic() - begun < 1.5
    assert (row.outcome, row.finish_reason, row.delivered, row.dialect) == ("aborted", "abort", False, dialect)
    assert 0 < len(row.output_ids) == len(row.logprobs or b"")
