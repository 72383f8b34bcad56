"""Any server with an OpenAI chat endpoint: a frozen model whose answers are used and not trained on.

Messages in, a message out. Ids are taken where the server gives them unasked, which most do not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from polar.engines.base import Generation, Passport, PromptIds
from polar.engines.chat import chat_body, read_chat
from polar.engines.http import AbandonedError, HTTPEngine
from polar.errors import EngineError
from polar.messages import ModelRequest, Sampling


class OpenAICompatibleEngine(HTTPEngine):
    """One server; its URL with or without the /v1 at its end."""

    name = "openai_compatible"
    TAKES_IDS = False
    CHATS = True
    KEEPS_PARTIALS = False
    PRODUCT = "an OpenAI-compatible chat endpoint"

    def __init__(self, url: str, http: aiohttp.ClientSession, *, model: str | None = None) -> None:
        super().__init__(url.rstrip("/").removesuffix("/v1"), http, model=model)

    async def passport(self) -> Passport:
        card = await self._card() if self.model is None else await self._own_card(self.model)
        self.model = self.model or card.get("id")
        if self.model is None:
            raise EngineError(
                f"the server at {self.shown} lists no model: set `model` of the lane's engine", code="engine_setup"
            )
        length = card.get("max_model_len") or card.get("context_length")
        return Passport(
            engine=self.name,
            model=self.model,
            tokenizer=None,
            context_length=int(length) if length else None,
            constrains=True,
            scripted=bool(card.get("scripted")),
            ids_in=False,
            ids_out=False,
        )

    async def _own_card(self, model: str) -> dict[str, Any]:
        cards = (await self._get("/v1/models", needed=False)).get("data")
        return next((card for card in cards or () if isinstance(card, dict) and card.get("id") == model), {})

    async def chat(self, request: ModelRequest, sampling: Sampling, *, request_id: str) -> Generation:
        asked = {key: value for key, value in sampling.asked().items() if key not in ("stop", "json_schema")}
        if asked.get("top_k") in (0, -1):
            del asked["top_k"]
        body: dict[str, Any] = {"model": self.model, **chat_body(request), **asked}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.json_schema is not None:
            schema = {"name": "answer", "schema": orjson.loads(sampling.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            return read_chat(await self._ask("/v1/chat/completions", body, request_id))
        except AbandonedError:
            return Generation([], None, "abort", detail="the request was aborted")

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        raise self._chat_only()

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        yield await self.generate(prompt_ids, sampling, request_id=request_id)

    async def score(self, ids: list[int]) -> list[float | None]:
        raise self._chat_only("no_score")

    def _chat_only(self, code: str = "engine_setup") -> EngineError:
        return EngineError("an openai_compatible engine takes messages, no token ids", code=code)
