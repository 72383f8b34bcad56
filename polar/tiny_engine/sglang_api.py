"""SGLang's native HTTP surface: /generate and the control routes that a trainer uses.

Field names and shapes are SGLang's; reading, refusing and running are in `wire`.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from polar.tiny_engine.model import CheckpointError
from polar.tiny_engine.requests import Completion, Engine, Finish, Request
from polar.tiny_engine.wire import (
    BadRequest,
    Prompt,
    Sampling,
    StrictInt,
    admit,
    complete_all,
    event_stream,
    json_response,
    prompts_of,
    read_body,
    room,
)

DEFAULT_MAX_NEW_TOKENS = 128


class SGLangSampling(Sampling):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = Field(default=None, ge=0)
    sampling_seed: int | None = None


class GenerateBody(BaseModel):
    """The body of /generate."""

    model_config = ConfigDict(extra="ignore")
    input_ids: list[StrictInt] | list[list[StrictInt]] | None = None
    text: str | list[str] | None = None
    sampling_params: SGLangSampling = Field(default_factory=SGLangSampling)
    return_logprob: bool = False
    logprob_start_len: int | None = None
    return_prompt_token_ids: bool = False
    stream: bool = False
    rid: str | list[str] | None = None

    @property
    def prompt(self) -> tuple[str, Prompt]:
        """The one prompt field in use, by name and value."""
        if (self.input_ids is None) == (self.text is None):
            raise BadRequest("exactly one of input_ids and text is required", "input_ids")
        return ("text", self.text) if self.input_ids is None else ("input_ids", self.input_ids)  # type: ignore[return-value]

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted too."""
        return self.return_logprob and self.logprob_start_len is not None and self.logprob_start_len >= 0


class AbortBody(BaseModel):
    """The body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(BaseModel):
    """The body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateWeightsBody(BaseModel):
    """The body of /update_weights_from_disk."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model_path: str
    weight_version: str | int | None = None
    abort_all_requests: bool = False


class UpdateVersionBody(BaseModel):
    """The body of /update_weight_version."""

    new_version: str | int
    abort_all_requests: bool = False


def finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    """How SGLang says why a sequence ended."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "abort":
        return {"type": "abort", "message": finish.message}
    return {"type": "length"}


@dataclass(frozen=True)
class SGLangSurface:
    """Handlers over one engine."""

    engine: Engine

    def routes(self) -> list[Route]:
        """Paths as in SGLang, old spellings included."""
        get, post = ["GET"], ["POST"]
        either = get + post
        return [
            Route("/generate", self.generate, methods=post),
            Route("/model_info", self.model_info, methods=get),
            Route("/get_model_info", self.model_info, methods=get),
            Route("/server_info", self.server_info, methods=get),
            Route("/get_server_info", self.server_info, methods=get),
            Route("/health_generate", self.health_generate, methods=get),
            Route("/abort_request", self.abort, methods=post),
            Route("/pause_generation", self.pause, methods=post),
            Route("/continue_generation", self.resume, methods=post),
            Route("/update_weights_from_disk", self.update_weights, methods=post),
            Route("/update_weight_version", self.update_version, methods=post),
            Route("/flush_cache", self.flush_cache, methods=either),
        ]

    async def generate(self, http: HTTPRequest) -> Response:
        """Continue one prompt or several."""
        body = await read_body(http, GenerateBody)
        requests, batch = self._requests(body)
        if body.stream:
            return event_stream(self.engine, requests, lambda state: [self._answer(body, state)])
        answers = [self._answer(body, done) for done in await complete_all(http, self.engine, requests)]
        return json_response(answers if batch else answers[0])

    def _requests(self, body: GenerateBody) -> tuple[list[Request], bool]:
        name, prompt = body.prompt
        prompts, batch = prompts_of(self.engine, prompt, name)
        given, n = body.sampling_params, body.sampling_params.n
        base = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
        if isinstance(body.rid, list) and len(body.rid) != len(prompts):
            raise BadRequest(f"rid has {len(body.rid)} entries for {len(prompts)} prompts", "rid")
        many = len(prompts) * n > 1
        requests = []
        for i, ids in enumerate(prompts):
            length = room(
                self.engine, ids, given.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, (name, "sampling_params.max_new_tokens")
            )
            for j in range(n):
                if isinstance(body.rid, list):
                    rid = body.rid[i] if n == 1 else f"{body.rid[i]}-{j}"
                else:
                    rid = f"{base}-{i * n + j}" if many else base
                requests.append(Request(ids, given.params(length, given.sampling_seed, j), body.scored, rid))
        return admit(self.engine, requests), batch or n > 1

    def _answer(self, body: GenerateBody, done: Completion) -> dict[str, Any]:
        reason = finish_reason(done.finish)
        if reason and reason["type"] == "length":
            reason["length"] = len(done.tokens)
        meta: dict[str, Any] = {
            "id": done.request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(done.request.prompt),
            "completion_tokens": len(done.tokens),
            "cached_tokens": 0,
            "weight_version": done.tokens[-1].version if done.tokens else self.engine.weight_version,
            "weight_versions": done.spans(),
            "e2e_latency": time.monotonic() - done.started,
        }
        if body.return_logprob:
            meta["output_token_logprobs"] = [[token.logprob, token.id, None] for token in done.tokens]
        if done.scores is not None:
            pairs = zip([None, *done.scores], done.request.prompt, strict=True)
            meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs][
                body.logprob_start_len or 0 :
            ]
        text = done.text(self.engine.tokenizer, body.sampling_params.skip_special_tokens)
        answer: dict[str, Any] = {"text": text, "output_ids": done.ids, "meta_info": meta}
        if body.return_prompt_token_ids:
            answer["prompt_token_ids"] = done.request.prompt
        return answer

    async def model_info(self, http: HTTPRequest) -> Response:
        """What is served, and with which weights."""
        return json_response(self._description())

    def _description(self) -> dict[str, Any]:
        info = self.engine.info
        return {
            "model_path": info.model_path,
            "tokenizer_path": info.model_path,
            "served_model_name": info.name,
            "context_length": info.context_length,
            "vocab_size": info.vocab_size,
            "weight_version": self.engine.weight_version,
            "is_generation": True,
            "scripted": info.scripted,
            "engine": "polar-tiny-engine",
        }

    async def server_info(self, http: HTTPRequest) -> Response:
        """The same, and how busy the engine is."""
        return json_response({**self._description(), "running_requests": self.engine.in_flight})

    async def health_generate(self, http: HTTPRequest) -> Response:
        """Healthy if one token can be had; a scripted engine is asked for none, since it matches prompts."""
        if not self.engine.info.scripted:
            params = SGLangSampling(temperature=0).params(1, None)
            await complete_all(http, self.engine, [Request([0], params)])
        return PlainTextResponse("")

    async def abort(self, http: HTTPRequest) -> Response:
        """End requests by name; the requests themselves answer with what they have."""
        body = await read_body(http, AbortBody)
        if not body.rid and not body.abort_all:
            raise BadRequest("either rid or abort_all is required", "rid")
        self.engine.abort(lambda request: body.abort_all or request.called(body.rid))
        return json_response({"success": True})

    async def pause(self, http: HTTPRequest) -> Response:
        """Stop sampling."""
        body = await read_body(http, PauseBody)
        self.engine.pause(body.mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: HTTPRequest) -> Response:
        """Go on."""
        self.engine.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights(self, http: HTTPRequest) -> Response:
        """Take a checkpoint's weights; what is in flight goes on with them unless told to end."""
        body = await read_body(http, UpdateWeightsBody)
        if body.abort_all_requests:
            self.engine.abort(lambda _: True)
        version = None if body.weight_version is None else str(body.weight_version)
        try:
            await self.engine.update_weights(body.model_path, version)
        except CheckpointError as error:
            return json_response({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return json_response(
            {
                "success": True,
                "message": f"Succeeded to update model weights. Weight version: {self.engine.weight_version}.",
                "num_paused_requests": 0,
            }
        )

    async def update_version(self, http: HTTPRequest) -> Response:
        """Name the weights in use anew."""
        body = await read_body(http, UpdateVersionBody)
        if body.abort_all_requests:
            self.engine.abort(lambda _: True)
        self.engine.weight_version = str(body.new_version)
        return json_response(
            {"success": True, "message": "Weight version updated", "new_version": self.engine.weight_version}
        )

    async def flush_cache(self, http: HTTPRequest) -> Response:
        """Nothing to do: no prefix outlives its request here."""
        return PlainTextResponse("Cache flushed.\n")
