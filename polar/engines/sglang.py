"""SGLang's stock `/generate`, which the tiny engine speaks too: ids in, ids and log-probabilities out.

Knows field names and failure shapes. What is tried again, and what a harness is told, is the proxy's affair.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from polar.engines.base import Engine, Generation, Passport, PromptIds
from polar.errors import EngineError
from polar.messages import FinishReason, Sampling

PROBE = aiohttp.ClientTimeout(total=15)
ABORT = aiohttp.ClientTimeout(total=5)
NOT_BEGUN = frozenset({429, 503})
"""Statuses that say the engine did not take the request up."""
OVERFLOW_WORDS = ("context length", "max_req_input_len", "longer than the model", "exceeds the maximum", "too long")
FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangEngine(Engine):
    """One SGLang server, 0.5.10 or newer, unpatched."""

    name = "sglang"
    STREAMS_IDS = True

    async def passport(self) -> Passport:
        info = await self._get("/model_info", "/get_model_info")
        cards = (await self._get("/v1/models")).get("data") or [{}]
        card = cards[0] if isinstance(cards, list) and isinstance(cards[0], dict) else {}
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
        )

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        async with self._post(self._body(prompt_ids, sampling, request_id)) as reply:
            return _generation(_object(await reply.read()))

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        body = self._body(prompt_ids, sampling, request_id) | {"stream": True}
        seen, last = 0, None
        async with self._post(body) as reply:
            async for event in self._events(reply):
                ids = event.get("output_ids")
                if not isinstance(ids, list):
                    raise _broken("output_ids")
                fresh, seen, last = ids[seen:], len(ids), event
                if fresh:
                    yield fresh
        if last is None or not _meta(last).get("finish_reason"):
            raise EngineError("the engine's stream ended before the answer was finished", code="engine_cut")
        yield _generation(last)

    async def abort(self, request_id: str) -> None:
        try:
            async with self.http.post(f"{self.url}/abort_request", json={"rid": request_id}, timeout=ABORT):
                pass
        except (aiohttp.ClientError, TimeoutError):
            return  # an engine that cannot be reached is not sampling for us either

    async def score(self, ids: list[int]) -> list[float | None]:
        body = self._body(ids, Sampling(max_tokens=0, temperature=1.0), None) | {"logprob_start_len": 0}
        async with self._post(body) as reply:
            pairs = _meta(_object(await reply.read())).get("input_token_logprobs")
        if not isinstance(pairs, list) or [pair[1] for pair in pairs] != ids:
            raise _broken("meta_info.input_token_logprobs")
        return [pair[0] for pair in pairs]

    def _body(self, ids: PromptIds, sampling: Sampling, request_id: str | None) -> dict[str, Any]:
        asked = sampling.asked()
        params = {key: value for key, value in asked.items() if key not in ("max_tokens", "seed", "stop")}
        if sampling.max_tokens is not None:
            params["max_new_tokens"] = sampling.max_tokens
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        if request_id is not None:
            body["rid"] = request_id
        return body

    @asynccontextmanager
    async def _post(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply to /generate once its status is good; every way to fail becomes an EngineError."""
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        answered = False
        try:
            async with self.http.post(
                f"{self.url}/generate", data=data, headers={"content-type": "application/json"}
            ) as reply:
                answered = True
                if reply.status != 200:
                    raise _refused(reply.status, await reply.text())
                yield reply
        except aiohttp.ClientConnectorError as error:
            raise EngineError(f"no engine answers at {self.url}", code="engine_down", retryable=True) from error
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.url} took too long", code="engine_timeout", status=504) from error
        except aiohttp.ClientError as error:
            # Closed before a status line: either a stale kept-alive connection or an engine that just died. Nothing
            # was sampled that anyone will see, so trying again cannot double an answer.
            reason = f"the connection to the engine at {self.url} broke: {error or type(error).__name__}"
            raise EngineError(reason, code="engine_cut", retryable=not answered) from error

    async def _events(self, reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        buffer = b""
        async for chunk in reply.content.iter_any():
            buffer += chunk
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data:").strip()
                if data and data != b"[DONE]":
                    yield _object(data)

    async def _get(self, *paths: str, needed: bool = True) -> dict[str, Any]:
        """The first of these paths that the server has; nothing if it has none and none is needed."""
        for path in paths:
            try:
                async with self.http.get(self.url + path, timeout=PROBE) as reply:
                    if reply.status == 200:
                        return _object(await reply.read())
                    if reply.status in NOT_BEGUN:
                        raise EngineError(f"the engine at {self.url} is not ready", code="engine_down", retryable=True)
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = f"no engine answers at {self.url}"
                raise EngineError(reason, code="engine_down", retryable=True) from error
        if not needed:
            return {}
        raise EngineError(
            f"the server at {self.url} has no {paths[0]}: is it an SGLang server?", code="engine_contract"
        )


def _refused(status: int, text: str) -> EngineError:
    message = text[:500]
    try:
        body = orjson.loads(text)
        inner = body.get("error", body)
        message = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (orjson.JSONDecodeError, AttributeError):
        pass
    if status == 400 and any(word in message.lower() for word in OVERFLOW_WORDS):
        return EngineError(message, code="context_length_exceeded", status=400)
    code = "engine_refused" if status < 500 else "engine_error"
    return EngineError(
        f"the engine answered {status}: {message}", code=code, status=status, retryable=status in NOT_BEGUN
    )


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineError("the engine's answer is not JSON", code="engine_contract") from error
    if not isinstance(value, dict):
        raise EngineError("the engine's answer is not a JSON object", code="engine_contract")
    if "error" in value and "meta_info" not in value:
        inner = value["error"]
        message = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
        raise _refused(int(inner.get("code") or 500) if isinstance(inner, dict) else 500, message)
    return value


def _meta(value: dict[str, Any]) -> dict[str, Any]:
    meta = value.get("meta_info")
    if not isinstance(meta, dict):
        raise _broken("meta_info")
    return meta


def _broken(field: str) -> EngineError:
    return EngineError(
        f"the engine's answer lacks a usable {field}; Polar needs stock SGLang 0.5.10 or newer", code="engine_contract"
    )


def _generation(value: dict[str, Any]) -> Generation:
    meta = _meta(value)
    ids, pairs, reason = value.get("output_ids"), meta.get("output_token_logprobs"), meta.get("finish_reason")
    if not isinstance(reason, dict) or (kind := FINISH.get(reason.get("type", ""))) is None:
        raise _broken("meta_info.finish_reason")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise _broken("output_ids")
    if pairs is None and kind == "abort" and not ids:
        pairs = []
    if not isinstance(pairs, list) or len(pairs) != len(ids):
        raise _broken("meta_info.output_token_logprobs")
    if not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs) or [pair[1] for pair in pairs] != ids:
        raise _broken("meta_info.output_token_logprobs (its ids are not output_ids)")
    logprobs = [pair[0] for pair in pairs]
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in logprobs):
        raise _broken("meta_info.output_token_logprobs (a log-probability is not a finite number)")
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


def _versions(meta: dict[str, Any], length: int) -> list[dict[str, Any]]:
    spans = meta.get("weight_versions")
    if isinstance(spans, list) and all(isinstance(span, dict) for span in spans):
        return spans
    version = meta.get("weight_version")
    return [] if version is None else [{"version": version, "start": 0, "end": length}]
