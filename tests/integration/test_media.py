"""Pictures that harnesses send: kept once, named by their content, and given out by it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.api import create_app
from polar.models import Lane, Media
from polar.settings import Settings
from polar.stages.calls import load_calls
from tests.fakes.dispatcher import FakeDispatcher
from tests.integration.rig import KEY, MODEL, completions, free_port, open_session, until

pytestmark = pytest.mark.integration
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DIGEST = hashlib.sha256(PNG).hexdigest()
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def ask(proxy: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer's message."""
    body = {"model": "m", "messages": messages, "max_tokens": 8}
    reply = httpx.post(f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY})
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def test_a_picture_is_kept_once(database: Engine, database_url: str, proxy: str, session_id: str) -> None:
    """Sent again with every turn, it is stored with the first; messages refer to it, and the API gives it out."""
    parts = [{"type": "text", "text": "How many?"}, {"type": "image_url", "image_url": {"url": URL}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*parts, {"type": "text", "text": "Count."}]}]
    messages += [ask(proxy, messages), {"role": "user", "content": "Again."}]
    ask(proxy, messages)
    first, second = completions(database)
    assert first.parsed["marks"] == ["images_unseen"]
    (image,) = first.parsed["images"]
    assert (image["digest"], image["message"], "images" in second.parsed) == (DIGEST, 0, False)
    assert second.parent_id == first.id
    with Session(database) as db:
        assert [(row.digest, row.media_type, row.data) for row in db.scalars(select(Media))] == [
            (DIGEST, "image/png", PNG)
        ]
        call = load_calls(db, session_id, 1)[0]
    shown = call.request["messages"][0]["content"]
    assert shown[1] == {"type": "image_url", "image_url": {"url": f"polar-media:{DIGEST}"}}
    api = create_app(Settings(database_url=database_url, auth="open"), FakeDispatcher())
    given = api.test_client().get(f"/rollout/media/{DIGEST}")
    assert (given.data, given.mimetype) == (PNG, "image/png")
    assert api.test_client().get("/rollout/media/other").status_code == 404
    api.config["DATABASE"].dispose()


def test_another_picture_is_another_conversation(database: Engine, proxy: str, session_id: str) -> None:
    """Two histories that differ in a picture alone do not share a parent."""
    question = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
    answer = ask(proxy, question)
    other = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}]
    ask(proxy, [*other, answer, {"role": "user", "content": "And?"}])
    assert completions(database)[1].parent_id is None


def test_a_picture_that_is_none(database: Engine, proxy: str, session_id: str) -> None:
    """What is no base64 is shown and kept as it came, and costs nothing else."""
    ask(proxy, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}]}])
    with Session(database) as db:
        assert db.scalars(select(Media)).all() == []


PAD = 999
"""The token that a picture becomes many of."""


class VisionEngine:
    """A chat endpoint of a model that sees pictures, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def card(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "vision", "max_model_len": 1000, "root": str(MODEL)}]})

    async def chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        choice = {
            "message": {"role": "assistant", "content": "a"},
            "finish_reason": "stop",
            "token_ids": [64],
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
        }
        prompt = [1, *[PAD] * 6, 2]
        return JSONResponse({"choices": [choice], "prompt_token_ids": prompt, "usage": {"prompt_tokens": len(prompt)}})

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Its address while inside."""
        routes = [Route("/v1/models", self.card), Route("/v1/chat/completions", self.chat, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), port=free_port(), log_level="error")
        server = uvicorn.Server(config)
        thread = Thread(target=server.run)
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{config.port}"
        finally:
            server.should_exit = True
            thread.join(10)


def test_an_engine_that_sees(database: Engine, proxy: str) -> None:
    """In canonical mode the engine gets the picture itself, and the ids that it made of it are on record."""
    vision = VisionEngine()
    with vision.serve() as url:
        session_id = open_session(database, url)
        with Session(database) as db, db.begin():
            db.execute(update(Lane).values(engine={"base_url": url, "engine": "vllm", "mode": "canonical"}))
        ask(proxy, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}])
    assert vision.asked[0]["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": URL}}]
    (row,) = completions(database)
    assert row.parsed["marks"] == []
    with Session(database) as db:
        (call,) = load_calls(db, session_id, 1)
        assert db.get(Media, DIGEST) is not None
    assert call.prompt_ids.tolist() == [1, *[PAD] * 6, 2]
    assert (call.output_ids.tolist(), row.parsed["images"][0]["digest"]) == ([64], DIGEST)
