"""Pictures that harnesses send: kept once, named by their content, and given out by it."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from polar.api import create_app
from polar.models import Media
from polar.settings import Settings
from polar.stages.calls import load_calls
from tests.fakes.dispatcher import FakeDispatcher
from tests.integration.rig import KEY, completions

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
