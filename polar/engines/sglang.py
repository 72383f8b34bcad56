"""SGLang's stock `/generate`, which the tiny engine speaks too: ids in, ids and log-probabilities out.

Knows field names and failure shapes. What is tried again, and what a harness is told, is the proxy's affair.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson

from polar.engines.base import Generation, Passport, PromptIds
from polar.engines.chat import chat_body, read_chat
from polar.engines.http import ABORT, HTTPEngine, json_object, prompt_json
from polar.errors import EngineError
from polar.messages import FinishReason, ModelRequest, Sampling

FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
IDS = b'"output_ids":['


class SGLangEngine(HTTPEngine):
    """One SGLang server, 0.5.10 or newer, unpatched."""

    name = "sglang"
    STREAMS_IDS = True
    CHATS = True
    TAKES_WEIGHTS = True
    PRODUCT = "stock SGLang 0.5.10 or newer"
    PROCESSED_BY = (
        "sample by temperature alone, for SGLang's log-probabilities are of the distribution before top_p, top_k and "
        "min_p cut it, and start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
    )

    async def passport(self) -> Passport:
        info = await self._get("/model_info", "/get_model_info")
        card = await self._card()
        length = info.get("context_length") or card.get("max_model_len")
        args = await self._get("/server_info", "/get_server_info", needed=False)
        return Passport(
            engine=self.name,
            model=str(self.model or card.get("id") or info.get("model_path") or ""),
            tokenizer=info.get("tokenizer_path") or info.get("model_path"),
            context_length=int(length) if length else None,
            version=args.get("version"),
            weight_version=info.get("weight_version"),
            constrains=args.get("grammar_backend") not in (None, "none"),
            scripted=bool(info.get("scripted")),
            images=bool(info.get("has_image_understanding")),
        )

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        sent = prompt_json(prompt_ids)
        value = await self._ask("/generate", self._body(sent, sampling, request_id), sent=sent)
        if value.get("prompt_token_ids") is True:
            value["prompt_token_ids"] = prompt_ids
        return self._generation(value)

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        # Each event would repeat the prompt's ids; how many there were it says anyway.
        more = {"stream": True, "return_prompt_token_ids": False}
        body = self._body(prompt_json(prompt_ids), sampling, request_id) | more
        seen, last = 0, b""
        async with self._post("/generate", body) as reply:
            async for found in self._reads(reply):
                last = found[-1]
                ids = ids_of(last)
                if ids is None:
                    ids = json_object(last).get("output_ids")
                if not isinstance(ids, list):
                    raise self._no_ids()
                fresh, seen = ids[seen:], len(ids)
                if fresh:
                    yield fresh
        event = json_object(last) if last else {}
        if not event or not self._meta(event).get("finish_reason"):
            raise EngineError("the engine's stream ended before the answer was finished", code="engine_cut")
        yield self._generation(event)

    async def chat(self, request: ModelRequest, sampling: Sampling, *, request_id: str) -> Generation:
        """From 0.5.13 on with ids: of the prompt and in meta_info; later versions have fields for both."""
        params = {key: value for key, value in sampling.asked().items() if key not in ("stop", "json_schema")}
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.json_schema is not None:
            schema = {"name": "answer", "schema": orjson.loads(sampling.json_schema)}
            params["response_format"] = {"type": "json_schema", "json_schema": schema}
        told = ("logprobs", "return_prompt_token_ids", "return_meta_info", "return_token_ids")
        body = {**chat_body(request), **params, **dict.fromkeys(told, True), "rid": request_id}
        if self.model is not None:
            body["model"] = self.model
        return read_chat(await self._ask("/v1/chat/completions", body))

    async def abort(self, request_id: str) -> None:
        """By name, upon which the request itself answers with what it has."""
        try:
            async with self.http.post(f"{self.url}/abort_request", json={"rid": request_id}, timeout=ABORT):
                pass
        except (aiohttp.ClientError, TimeoutError):
            return  # an engine that cannot be reached is not sampling for us either

    async def score(self, ids: list[int]) -> list[float | None]:
        body = self._body(prompt_json(ids), Sampling(max_tokens=0, temperature=1.0), None) | {"logprob_start_len": 0}
        async with self._post("/generate", body) as reply:
            pairs = self._meta(json_object(await reply.read())).get("input_token_logprobs")
        if not isinstance(pairs, list) or [pair[1] for pair in pairs] != ids:
            raise self._broken("meta_info.input_token_logprobs")
        return [pair[0] for pair in pairs]

    async def update_weights(self, path: str, version: str) -> None:
        told = await self._ask(
            "/update_weights_from_disk", {"model_path": path, "weight_version": version, "flush_cache": True}
        )
        if not told.get("success"):
            raise EngineError(f"the engine kept its weights: {told.get('message')}", code="engine_refused")
        found = (await self._get("/model_info", "/get_model_info")).get("weight_version")
        if found != version:
            raise EngineError(f"the engine says that its weights are {found!r} after the push", code="engine_contract")

    def _body(self, ids: bytes, sampling: Sampling, request_id: str | None) -> dict[str, Any]:
        asked = sampling.asked()
        params = {key: value for key, value in asked.items() if key not in ("max_tokens", "seed", "stop")}
        if sampling.max_tokens is not None:
            params["max_new_tokens"] = sampling.max_tokens
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        # Versions before 0.5.13 do not know the last field, and pass over it.
        body: dict[str, Any] = {
            "input_ids": orjson.Fragment(ids),
            "sampling_params": params,
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }
        if request_id is not None:
            body["rid"] = request_id
        return body

    def _meta(self, value: dict[str, Any]) -> dict[str, Any]:
        meta = value.get("meta_info")
        if not isinstance(meta, dict):
            raise self._broken("meta_info")
        return meta

    def _generation(self, value: dict[str, Any]) -> Generation:
        meta = self._meta(value)
        ids, pairs, reason = value.get("output_ids"), meta.get("output_token_logprobs"), meta.get("finish_reason")
        if not isinstance(reason, dict) or (kind := FINISH.get(reason.get("type", ""))) is None:
            raise self._broken("meta_info.finish_reason")
        if not ids and (ids is None or meta.get("completion_tokens") or pairs or value.get("text")):
            raise self._no_ids()
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise self._broken("output_ids")
        if pairs is None and kind == "abort" and not ids:
            pairs = []
        if not isinstance(pairs, list) or len(pairs) != len(ids):
            raise self._broken("meta_info.output_token_logprobs")
        if not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs) or [pair[1] for pair in pairs] != ids:
            raise self._broken("meta_info.output_token_logprobs (its ids are not output_ids)")
        logprobs = [pair[0] for pair in pairs]
        if not all(isinstance(value, float | int) and math.isfinite(value) for value in logprobs):
            raise self._broken("meta_info.output_token_logprobs (a log-probability is not a finite number)")
        return Generation(
            output_ids=ids,
            logprobs=[float(value) for value in logprobs],
            finish_reason=kind,
            matched_stop=reason.get("matched"),
            policy_versions=_versions(meta, len(ids)),
            prompt_ids=value.get("prompt_token_ids"),
            prompt_tokens=meta.get("prompt_tokens"),
            detail=reason.get("message"),
            timings={key: meta[key] for key in ("e2e_latency", "cached_tokens", "queue_time") if key in meta},
        )


def ids_of(event: bytes) -> list[int] | None:
    """The ids of an event, cut out of its text; None where they do not stand there as SGLang writes them.

    Each event repeats all that came before it, log-probabilities too: to read each of them whole would take a time that
    grows with the square of the answer. No text of a model is taken for the field: its quotes would be escaped."""
    place = event.find(IDS)
    if place < 0:
        return None
    try:
        ids: list[int] = orjson.loads(event[place + len(IDS) - 1 : event.find(b"]", place) + 1])
    except orjson.JSONDecodeError:
        return None
    return ids


def _versions(meta: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """Spans where the engine tells them (0.5.20 on), else one version for all: the one it had when it ended."""
    spans = meta.get("weight_versions")
    if isinstance(spans, list) and all(isinstance(span, dict) for span in spans):
        return spans
    version = meta.get("weight_version")
    return [] if version is None else [{"version": version, "start": 0, "end": length}]
