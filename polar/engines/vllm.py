"""vLLM's stock HTTP: ids in by `/inference/v1/generate` where the server has it open, else by `/v1/completions`.

Every call is a stream, also where nobody watches: what came before an abort is then at hand, and closing the
connection aborts on every version, with whatever flags. Sampling fields that nobody set are sent at their neutral
values, for otherwise the checkpoint's generation_config.json would set them, and no record would say so.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from polar.engines.base import Generation, Passport, PromptIds
from polar.engines.chat import chat_body, read_chat
from polar.engines.http import AbandonedError, HTTPEngine, prompt_json
from polar.errors import EngineError
from polar.messages import FinishReason, ModelRequest, Sampling

FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}
NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
TOKEN_ROUTE, TEXT_ROUTE = "/inference/v1/generate", "/v1/completions"
SHUT = frozenset({403, 404, 405, 501})
"""Statuses of a token route that is not there, or not open without --enable-scale-out."""
PACE = 16
"""Tokens per event where nobody watches the stream; after an abort up to so many are lost."""
PACED = (0, 32)
"""Versions from here on let the request say the pace."""
ANY_OBJECT = "{}"


@dataclass(slots=True)
class Output:
    """A sampled output as its events come."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_ids: list[int] | Literal[True] | None = None
    """True: the very ones that were sent."""
    versions: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    matched: int | str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    text: bool = False
    """Something was sampled, says the text, whether or not its ids came."""

    def take(self, event: dict[str, Any]) -> list[int]:
        """The new ids of an event."""
        self.usage = event.get("usage") or self.usage
        self.prompt_ids = event.get("prompt_token_ids") or self.prompt_ids
        fresh: list[int] = []
        for choice in event.get("choices") or ():
            fresh = choice.get("token_ids") or []
            self.ids += fresh
            self.text = self.text or bool(choice.get("text"))
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            self.versions = choice.get("weight_versions") or self.versions
            self.finish = choice.get("finish_reason") or self.finish
            matched = choice.get("stop_reason")
            self.matched = self.matched if matched is None else matched
            self.logprobs += _logprobs(choice)
        return fresh

    def generation(self, kind: FinishReason, sent: PromptIds, detail: str | None = None) -> Generation:
        """What the events add up to, after these prompt ids."""
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Generation(
            output_ids=self.ids,
            logprobs=self.logprobs[: len(self.ids)] if len(self.logprobs) >= len(self.ids) else None,
            finish_reason=kind,
            matched_stop=self.matched,
            policy_versions=self.versions,
            prompt_ids=sent if self.prompt_ids is True else self.prompt_ids,
            prompt_tokens=self.usage.get("prompt_tokens"),
            detail=detail,
            timings={} if cached is None else {"cached_tokens": cached},
        )


class VLLMEngine(HTTPEngine):
    """One vLLM server, 0.14 or newer, unpatched."""

    name = "vllm"
    STREAMS_IDS = True
    CHATS = True
    TAKES_WEIGHTS = True
    PRODUCT = "stock vLLM 0.14 or newer"
    PROCESSED_BY = "start vLLM with --logprobs-mode processed_logprobs"

    def __init__(self, url: str, http: aiohttp.ClientSession, *, model: str | None = None) -> None:
        super().__init__(url, http, model=model)
        self._token_route = True
        """Until the server has shut it."""
        self._paced = False

    async def passport(self) -> Passport:
        card = await self._card()
        version = str((await self._get("/version", needed=False)).get("version") or "")
        weights = await self._get("/weight_info", needed=False)
        self.model = self.model or card.get("id")
        self._paced = _numbers(version) >= PACED
        length = card.get("max_model_len")
        return Passport(
            engine=self.name,
            model=str(self.model or ""),
            tokenizer=card.get("root"),
            context_length=int(length) if length else None,
            version=version or None,
            weight_version=weights.get("weight_version"),
            constrains=not card.get("scripted") and await self._constrains(),
            scripted=bool(card.get("scripted")),
        )

    async def _constrains(self) -> bool:
        """Whether a schema holds: the one value that it leaves is the answer."""
        wanted = Sampling(max_tokens=8, json_schema='{"enum": [7]}')
        body = self._named({"prompt": [1], **self._params(wanted), **_schema(wanted, TEXT_ROUTE)})
        try:
            choices = (await self._ask(TEXT_ROUTE, body)).get("choices") or [{}]
        except EngineError as error:
            if error.retryable:
                raise
            return False
        return str(choices[0].get("text", "")).strip() == "7"

    async def update_weights(self, path: str, version: str) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        for route, body in (
            ("/collective_rpc", reload),
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": version}),
        ):
            try:
                async with self._post(route, body):
                    pass
            except EngineError as error:
                if error.status != 404:
                    raise
                said = f"the engine at {self.url} has no {route}: start vLLM with VLLM_SERVER_DEV_MODE=1"
                raise EngineError(said, code="takes_no_weights") from error

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        async for item in self._sample(prompt_ids, sampling, request_id, PACE):
            if isinstance(item, Generation):
                return item
        raise EngineError("the engine's stream ended without an answer", code="engine_cut")

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        async for item in self._sample(prompt_ids, sampling, request_id, 1):
            yield item

    async def _sample(
        self, ids: PromptIds, sampling: Sampling, request_id: str, pace: int
    ) -> AsyncIterator[list[int] | Generation]:
        if self._token_route:
            try:
                async for item in self._read(TOKEN_ROUTE, ids, sampling, request_id, pace):
                    yield item
                return
            except EngineError as error:
                if error.status not in SHUT:
                    raise
                self._token_route = False
        async for item in self._read(TEXT_ROUTE, ids, sampling, request_id, pace):
            yield item

    async def _read(
        self, route: str, ids: PromptIds, sampling: Sampling, request_id: str, pace: int
    ) -> AsyncIterator[list[int] | Generation]:
        output, sent = Output(), prompt_json(ids)
        try:
            async with self._open(route, sent, sampling, request_id, pace) as reply:
                async for event in self._events(reply, sent=sent):
                    if fresh := output.take(event):
                        yield fresh
        except AbandonedError:
            yield output.generation("abort", ids, "the request was aborted")
            return
        if output.finish is None:
            raise EngineError("the engine's stream ended before the answer was finished", code="engine_cut")
        if (kind := FINISH.get(output.finish)) is None:
            raise self._broken(f"finish_reason ({output.finish})")
        told = output.usage.get("completion_tokens")
        if not output.ids and (told or output.text or (told is None and kind != "abort")):
            raise self._no_ids()
        if told is not None and told != len(output.ids):
            raise self._broken(f"token_ids ({len(output.ids)} came of {told})")
        if len(output.logprobs) != len(output.ids) or not all(map(math.isfinite, output.logprobs)):
            raise self._broken("logprobs (one finite number for each of token_ids)")
        yield output.generation(kind, ids)

    def _open(
        self, route: str, sent: bytes, sampling: Sampling, request_id: str, pace: int
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        params = {**self._params(sampling), **_schema(sampling, route), "logprobs": 0}
        if pace > 1 and self._paced:
            params["stream_interval"] = pace
        ids = orjson.Fragment(sent)
        asked = {"token_ids": ids, "sampling_params": params} if route == TOKEN_ROUTE else {"prompt": ids, **params}
        wanted = {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
        return self._post(route, self._named({**asked, **wanted, "request_id": request_id}), request_id)

    def _params(self, sampling: Sampling) -> dict[str, Any]:
        asked = {key: value for key, value in sampling.asked().items() if key != "json_schema"}
        if sampling.stop:
            asked["stop"] = list(sampling.stop)
        return {**NEUTRAL, **asked}

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        return body if self.model is None else {"model": self.model, **body}

    async def chat(self, request: ModelRequest, sampling: Sampling, *, request_id: str) -> Generation:
        params = {**self._params(sampling), **_schema(sampling, TEXT_ROUTE)}
        own = {"return_token_ids": True, "request_id": request_id}
        body = self._named({**chat_body(request), **params, **own, "logprobs": True, "top_logprobs": 0})
        try:
            return read_chat(await self._ask("/v1/chat/completions", body, request_id))
        except AbandonedError:
            return Generation([], None, "abort", detail="the request was aborted")

    async def score(self, ids: list[int]) -> list[float | None]:
        params = self._params(Sampling(temperature=1.0, max_tokens=1))
        answer = await self._ask(TEXT_ROUTE, self._named({"prompt": ids, **params, "prompt_logprobs": 0}))
        rows = (answer.get("choices") or [{}])[0].get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise self._broken("prompt_logprobs")
        try:
            return [None if row is None else row[str(token)]["logprob"] for row, token in zip(rows, ids, strict=True)]
        except (KeyError, TypeError) as error:
            raise self._broken("prompt_logprobs (for each prompt id its own)") from error


def _logprobs(choice: dict[str, Any]) -> list[float]:
    """Of either route: objects with ids, or OpenAI's parallel lists."""
    given = choice.get("logprobs") or {}
    if given.get("content") is not None:
        return [float(entry["logprob"]) for entry in given["content"]]
    return [math.nan if value is None else float(value) for value in given.get("token_logprobs") or ()]


def _schema(sampling: Sampling, route: str) -> dict[str, Any]:
    if sampling.json_schema is None:
        return {}
    any_object = sampling.json_schema.strip() == ANY_OBJECT
    if route == TOKEN_ROUTE:
        return {"structured_outputs": {"json_object": True} if any_object else {"json": sampling.json_schema}}
    if any_object:
        return {"response_format": {"type": "json_object"}}
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": orjson.loads(sampling.json_schema)},
        }
    }


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; of anything that does not begin with one, none."""
    found = []
    for part in version.split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)
