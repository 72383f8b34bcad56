"""llama.cpp's `llama-server`: `/completion` with the prompt as ids.

For models that run on it, not for pushing weights: it takes none. Not streamed: its events leave out tokens that end
in the middle of a character, while the whole answer has every id. For the same tokens it keeps no probability; an
answer with such a gap has no log-probabilities at all, and its trace says so.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import orjson

from polar.engines.base import Generation, Passport, PromptIds
from polar.engines.chat import chat_body, read_chat
from polar.engines.http import AbandonedError, HTTPEngine
from polar.errors import EngineError
from polar.messages import FinishReason, ModelRequest, Sampling

NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Its own defaults cut and penalise; a field that nobody set must not."""
LEAST = 1e-38
"""Below what its 32-bit probabilities can hold."""
FINISH: dict[str, FinishReason] = {"eos": "stop", "word": "stop", "limit": "length", "none": "abort"}


class LlamaCppEngine(HTTPEngine):
    """One llama-server, of 2025 or newer."""

    name = "llama_cpp"
    CHATS = True
    KEEPS_PARTIALS = False
    PROCESSED_BY = "take a llama-server of 2025 or newer, which knows post_sampling_probs"
    PRODUCT = "llama.cpp's llama-server of 2025 or newer"

    async def passport(self) -> Passport:
        props = await self._get("/props")
        settings = props.get("default_generation_settings") or {}
        card = await self._card()
        self.model = self.model or card.get("id") or props.get("model_alias")
        length = settings.get("n_ctx") or (card.get("meta") or {}).get("n_ctx_train")
        return Passport(
            engine=self.name,
            model=str(self.model or props.get("model_path") or ""),
            # A GGUF file holds its tokenizer in a form of its own: the topology has to name the folder.
            tokenizer=props.get("tokenizer_path"),
            context_length=int(length) if length else None,
            version=props.get("build_info"),
            constrains=not props.get("scripted"),
            scripted=bool(props.get("scripted")),
            images=bool((props.get("modalities") or {}).get("vision")),
        )

    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        try:
            return self._generation(await self._ask("/completion", self._body(prompt_ids, sampling), request_id))
        except AbandonedError:
            return Generation([], [], "abort", detail="the request was aborted")

    async def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        whole = await self.generate(prompt_ids, sampling, request_id=request_id)
        if whole.output_ids:
            yield whole.output_ids
        yield whole

    async def chat(self, request: ModelRequest, sampling: Sampling, *, request_id: str) -> Generation:
        params = {key: value for key, value in self._params(sampling).items() if key != "n_predict"}
        if sampling.max_tokens is not None:
            params["max_tokens"] = sampling.max_tokens
        try:
            return read_chat(await self._ask("/v1/chat/completions", {**chat_body(request), **params}, request_id))
        except AbandonedError:
            return Generation([], None, "abort", detail="the request was aborted")

    async def score(self, ids: list[int]) -> list[float | None]:
        raise EngineError(
            "llama-server gives no log-probabilities of a prompt, so its tokens cannot be scored again",
            code="no_score",
        )

    def _params(self, sampling: Sampling) -> dict[str, Any]:
        asked = sampling.asked()
        for name, theirs in (("max_tokens", "n_predict"), ("repetition_penalty", "repeat_penalty")):
            if name in asked:
                asked[theirs] = asked.pop(name)
        if sampling.top_k == -1:
            asked["top_k"] = 0
        if sampling.stop:
            asked["stop"] = list(sampling.stop)
        if sampling.json_schema is not None:
            asked["json_schema"] = orjson.loads(sampling.json_schema)
        return {**NEUTRAL, **asked}

    def _body(self, ids: PromptIds, sampling: Sampling) -> dict[str, Any]:
        return {
            "prompt": ids,
            **self._params(sampling),
            "stream": False,
            "return_tokens": True,
            "n_probs": 1,
            # Of the distribution that was drawn from; without this they are the model's own.
            "post_sampling_probs": True,
        }

    def _generation(self, value: dict[str, Any]) -> Generation:
        ids, entries = value.get("tokens"), value.get("completion_probabilities")
        kind = FINISH.get(str(value.get("stop_type")))
        if kind is None:
            raise self._broken("stop_type")
        if not ids and (ids is None or value.get("tokens_predicted") or value.get("content")):
            raise self._no_ids()
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise self._broken("tokens")
        if value.get("truncated"):
            raise EngineError(
                "llama-server dropped a part of the prompt to make it fit; start it without --context-shift",
                code="engine_altered_prompt",
            )
        timings = value.get("timings") or {}
        cached = value.get("tokens_cached_prompt", timings.get("cache_n"))
        seen = value.get("tokens_evaluated")
        return Generation(
            output_ids=ids,
            logprobs=_logprobs(entries or [], ids),
            finish_reason=kind,
            matched_stop=(value.get("stopping_word") or None) if value.get("stop_type") == "word" else None,
            prompt_tokens=seen if isinstance(seen, int) else None,
            timings={} if cached is None else {"cached_tokens": cached},
        )


def _logprobs(entries: list[dict[str, Any]], ids: list[int]) -> list[float] | None:
    """One for each id, or none at all."""
    if [entry.get("id") for entry in entries] != ids:
        return None
    found = []
    for entry in entries:
        if "logprob" in entry:
            found.append(float(entry["logprob"]))
        elif "prob" in entry:
            found.append(math.log(max(float(entry["prob"]), LEAST)))
        else:
            return None
    return found
