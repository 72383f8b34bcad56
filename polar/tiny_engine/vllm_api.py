"""vLLM's HTTP surface: /v1/models, the completion and chat endpoints, /inference/v1/generate and the tokenizer routes.

Field names and shapes are vLLM's; reading, refusing and running are in `wire`. /tokenize and /detokenize answer the
fields of both engines, which do not collide.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

import polar
from polar.tiny_engine import chat
from polar.tiny_engine.model import CheckpointError
from polar.tiny_engine.requests import Completion, Engine, Request, Token
from polar.tiny_engine.wire import (
    BadRequest,
    Prompt,
    Sampling,
    admit,
    complete_all,
    event_stream,
    json_response,
    prompts_of,
    read_body,
    room,
)

DEFAULT_MAX_TOKENS = 16


class VLLMSampling(Sampling):
    """Sampling fields as vLLM names them."""

    max_tokens: int | None = Field(default=None, ge=0)
    seed: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=1)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=1)


class StreamOptions(BaseModel):
    """`stream_options` of /v1/completions."""

    include_usage: bool = False


class ReloadArguments(BaseModel):
    """`kwargs` of reload_weights."""

    weights_path: str


class RPCBody(BaseModel):
    """The body of /collective_rpc."""

    model_config = ConfigDict(extra="forbid")
    method: str
    timeout: float | None = None
    kwargs: ReloadArguments


class CompletionBody(VLLMSampling):
    """The body of /v1/completions."""

    prompt: Prompt
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    return_token_ids: bool = False
    echo: bool = False
    request_id: str | None = None


class ChatBody(VLLMSampling):
    """The body of /v1/chat/completions. `logprobs` is a switch here."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    model: str | None = None
    stream: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool = False
    return_token_ids: bool = False
    request_id: str | None = None


class TokenGenerateBody(BaseModel):
    """The body of /inference/v1/generate."""

    model_config = ConfigDict(extra="ignore")
    token_ids: list[StrictInt]
    sampling_params: VLLMSampling = Field(default_factory=VLLMSampling)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    return_token_ids: bool = False
    request_id: str | None = None


class TokenizeBody(BaseModel):
    """The body of /tokenize."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """The body of /detokenize."""

    tokens: list[StrictInt]
    skip_special_tokens: bool = False


class Delta:
    """What is new in a growing completion since it was last asked."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine = engine
        self._skip = sampling.skip_special_tokens
        stops = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
        self._hold = max((len(stop) - 1 for stop in stops if stop), default=0)
        self._tokens = 0
        self._text = 0

    def take(self, state: Completion) -> tuple[str, list[Token], int]:
        """New text, new tokens and where in the text the new part starts."""
        start, tokens = self._text, state.tokens[self._tokens :]
        self._tokens = len(state.tokens)
        text = state.text(self._engine.tokenizer, self._skip)
        if state.finish is None:
            # What may yet turn out to be half a character, or the start of a stop string, waits.
            text = text[: len(text) - self._hold].rstrip("\ufffd")
        self._text = max(start, len(text))
        return text[start:], tokens, start


@dataclass(frozen=True)
class VLLMSurface:
    """Handlers over one engine."""

    engine: Engine

    def routes(self) -> list[Route]:
        """Paths as in vLLM."""
        get, post = ["GET"], ["POST"]
        return [
            Route("/v1/models", self.models, methods=get),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/inference/v1/generate", self.generate, methods=post),
            Route("/version", self.version, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/collective_rpc", self.collective_rpc, methods=post),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=post),
        ]

    async def models(self, http: HTTPRequest) -> Response:
        """The one model served."""
        info = self.engine.info
        card = {
            "id": info.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "polar-tiny-engine",
            "root": info.model_path,
            "parent": None,
            "max_model_len": info.context_length,
            "scripted": info.scripted,
        }
        return json_response({"object": "list", "data": [card]})

    async def version(self, http: HTTPRequest) -> Response:
        """Polar's version: this is not vLLM, and does not claim one of its releases."""
        return json_response({"version": f"polar-tiny-engine {polar.__version__}"})

    async def completions(self, http: HTTPRequest) -> Response:
        """Continue text or ids."""
        body = await read_body(http, CompletionBody)
        if body.echo:
            raise BadRequest("echo is not supported by this engine", "echo")
        prompts, _ = prompts_of(self.engine, body.prompt, "prompt")
        rid = body.request_id or http.headers.get("x-request-id") or uuid.uuid4().hex
        requests = self._requests(body.model, prompts, body, rid, ("prompt", "max_tokens"))
        head = {
            "id": f"cmpl-{rid}", "object": "text_completion", "created": int(time.time()),
            "model": self.engine.info.name,
        }  # fmt: skip
        if body.stream:
            return event_stream(self.engine, requests, self._completion_chunks(body, head))
        done = await complete_all(http, self.engine, requests)
        choices = [self._completion_choice(body, i, state) for i, state in enumerate(done)]
        return json_response({**head, "choices": choices, "usage": usage(done, len(prompts))})

    def _completion_choice(self, body: CompletionBody, index: int, state: Completion) -> dict[str, Any]:
        text, tokens, _ = Delta(self.engine, body).take(state)
        return {
            **self._completion_part(body, index, state, text, tokens, 0),
            "prompt_token_ids": state.request.prompt if body.return_token_ids else None,
            "prompt_logprobs": self._prompt_logprobs(state),
        }

    def _completion_part(
        self, body: CompletionBody, index: int, state: Completion, text: str, tokens: list[Token], start: int
    ) -> dict[str, Any]:
        finish = state.finish
        part: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._text_logprobs(tokens, start) if body.logprobs is not None else None,
            "finish_reason": finish.kind if finish else None,
            # As in vLLM: null for the model's own end token, the match for a stop that the client named.
            "stop_reason": finish.matched if finish and self._named_stop(body, finish.matched) else None,
        }
        if body.return_token_ids:
            part["token_ids"] = [token.id for token in tokens]
        return part

    def _completion_chunks(
        self, body: CompletionBody, head: dict[str, Any]
    ) -> Callable[[Completion], Iterator[dict[str, Any]]]:
        delta = Delta(self.engine, body)
        first = True

        def chunks(state: Completion) -> Iterator[dict[str, Any]]:
            nonlocal first
            text, tokens, start = delta.take(state)
            if not tokens and not text and state.finish is None:
                return
            part = self._completion_part(body, 0, state, text, tokens, start)
            if first and body.return_token_ids:
                part["prompt_token_ids"] = state.request.prompt
            first = False
            yield {**head, "choices": [part]}
            if state.finish and body.stream_options.include_usage:
                yield {**head, "choices": [], "usage": usage([state], 1)}

        return chunks

    async def chat(self, http: HTTPRequest) -> Response:
        """Answer messages, rendered by the checkpoint's template; whole, for a stream of it nobody here asks."""
        body = await read_body(http, ChatBody)
        if body.stream:
            raise BadRequest("stream is not supported by this engine's chat endpoint", "stream")
        tools = None if body.tool_choice == "none" else body.tools
        try:
            text = chat.render(Path(self.engine.info.model_path), body.messages, tools)
        except chat.TemplateError as error:
            raise BadRequest(str(error), "messages") from error
        prompts, _ = prompts_of(self.engine, text, "messages")
        rid = body.request_id or http.headers.get("x-request-id") or uuid.uuid4().hex
        if body.max_tokens is None:
            body.max_tokens = body.max_completion_tokens
        if body.max_tokens is None:
            body.max_tokens = max(1, self.engine.info.context_length - len(prompts[0]))
        done = await complete_all(
            http, self.engine, self._requests(body.model, prompts, body, rid, ("messages", "max_tokens"))
        )
        answer = {
            "id": f"chatcmpl-{rid}", "object": "chat.completion", "created": int(time.time()),
            "model": self.engine.info.name, "usage": usage(done, 1),
            "prompt_token_ids": prompts[0] if body.return_token_ids else None,
        }  # fmt: skip
        return json_response({**answer, "choices": [self._chat_choice(body, i, each) for i, each in enumerate(done)]})

    def _chat_choice(self, body: ChatBody, index: int, state: Completion) -> dict[str, Any]:
        message = chat.read(
            state.text(self.engine.tokenizer, skip_special_tokens=False),
            bool(body.tools) and body.tool_choice != "none",
        )
        kind = state.finish.kind if state.finish else None
        matched = state.finish.matched if state.finish else None
        content = [{"token": self._text_of(t), "logprob": t.logprob, "top_logprobs": []} for t in state.tokens]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": content} if body.logprobs else None,
            "finish_reason": "tool_calls" if kind == "stop" and "tool_calls" in message else kind,
            "stop_reason": matched if self._named_stop(body, matched) else None,
            "token_ids": state.ids if body.return_token_ids else None,
        }

    def _text_of(self, token: Token) -> str:
        return str(self.engine.tokenizer.decode([token.id], skip_special_tokens=False))

    async def generate(self, http: HTTPRequest) -> Response:
        """Continue ids, with nothing but ids in the answer."""
        body = await read_body(http, TokenGenerateBody)
        sampling = body.sampling_params
        prompts, _ = prompts_of(self.engine, body.token_ids, "token_ids")
        rid = body.request_id or http.headers.get("x-request-id") or uuid.uuid4().hex
        fields = ("token_ids", "sampling_params.max_tokens")
        requests = self._requests(body.model, prompts, sampling, rid, fields)
        if body.stream:
            delta = Delta(self.engine, sampling)
            told = {"prompt_token_ids": body.token_ids} if body.return_token_ids else {}

            def chunk(state: Completion) -> Iterator[dict[str, Any]]:
                _, tokens, _ = delta.take(state)
                if tokens or state.finish:
                    choice = self._generate_choice(sampling, 0, state, tokens)
                    yield {"request_id": rid, "choices": [choice], **told}
                    told.clear()
                if state.finish and body.stream_options.include_usage:
                    yield {"request_id": rid, "choices": [], "usage": usage([state], 1)}

            return event_stream(self.engine, requests, chunk)
        done = await complete_all(http, self.engine, requests)
        choices = [self._generate_choice(sampling, i, state, state.tokens) for i, state in enumerate(done)]
        answer: dict[str, Any] = {"request_id": rid, "choices": choices, "usage": usage(done, 1)}
        answer["prompt_token_ids"] = body.token_ids if body.return_token_ids else None
        return json_response({**answer, "prompt_logprobs": self._prompt_logprobs(done[0])})

    def _generate_choice(
        self, sampling: VLLMSampling, index: int, state: Completion, tokens: list[Token]
    ) -> dict[str, Any]:
        content = [{"token_id": t.id, "token": f"token_id:{t.id}", "logprob": t.logprob} for t in tokens]
        matched = state.finish.matched if state.finish else None
        return {
            "index": index,
            "token_ids": [token.id for token in tokens],
            "logprobs": {"content": content} if sampling.logprobs is not None else None,
            "finish_reason": state.finish.kind if state.finish else None,
            "stop_reason": matched if self._named_stop(sampling, matched) else None,
            "weight_versions": state.spans() if state.finish else None,
        }

    async def collective_rpc(self, http: HTTPRequest) -> Response:
        """Of all that a worker of vLLM's can be told: to take a checkpoint's weights."""
        body = await read_body(http, RPCBody)
        if body.method != "reload_weights":
            raise BadRequest(f"there is no method {body.method!r} here", "method", status=404)
        try:
            await self.engine.update_weights(body.kwargs.weights_path, None)
        except CheckpointError as error:
            raise BadRequest(str(error), "kwargs.weights_path") from error
        return json_response({"results": [None]})

    async def reset_prefix_cache(self, http: HTTPRequest) -> Response:
        """Nothing to do: no prefix outlives its request here."""
        return Response()

    def _requests(
        self, model: str | None, prompts: list[list[int]], sampling: VLLMSampling, rid: str, fields: tuple[str, str]
    ) -> list[Request]:
        if model is not None and model != self.engine.info.name:
            raise BadRequest(f"The model `{model}` does not exist.", "model", status=404)
        scored = sampling.prompt_logprobs is not None
        many = len(prompts) * sampling.n > 1
        requests = []
        for i, ids in enumerate(prompts):
            length = room(self.engine, ids, sampling.max_tokens, DEFAULT_MAX_TOKENS, fields)
            for j in range(sampling.n):
                name = f"{rid}-{i * sampling.n + j}" if many else rid
                requests.append(Request(ids, sampling.params(length, sampling.seed, j), scored, name))
        return admit(self.engine, requests)

    def _named_stop(self, sampling: Sampling, matched: int | str | None) -> bool:
        return isinstance(matched, str) or matched in (sampling.stop_token_ids or ())

    def _text_logprobs(self, tokens: list[Token], start: int) -> dict[str, Any]:
        texts = [self.engine.tokenizer.decode([token.id], skip_special_tokens=False) for token in tokens]
        offsets = [start + sum(map(len, texts[:i])) for i in range(len(texts))]
        values = [token.logprob for token in tokens]
        top = [{text: value} for text, value in zip(texts, values, strict=True)]
        return {"tokens": texts, "token_logprobs": values, "text_offset": offsets, "top_logprobs": top}

    def _prompt_logprobs(self, state: Completion) -> list[dict[str, Any] | None] | None:
        if state.scores is None:
            return None
        pairs = zip(state.request.prompt[1:], state.scores, strict=True)
        return [None, *({str(token): {"logprob": logprob}} for token, logprob in pairs)]

    async def tokenize(self, http: HTTPRequest) -> Response:
        """Text to ids; rendering a conversation is left to the client, on purpose."""
        body = await read_body(http, TokenizeBody)
        encoding = self.engine.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return json_response(
            {
                "tokens": encoding.ids,
                "count": len(encoding.ids),
                "max_model_len": self.engine.info.context_length,
                "token_strs": encoding.tokens if body.return_token_strs else None,
            }
        )

    async def detokenize(self, http: HTTPRequest) -> Response:
        """Ids to text."""
        body = await read_body(http, DetokenizeBody)
        ids = prompts_of(self.engine, body.tokens, "tokens")[0][0] if body.tokens else []
        text = self.engine.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)
        return json_response({"prompt": text, "text": text})


def usage(done: list[Completion], prompts: int) -> dict[str, int]:
    """Token counts of an answer; several samples of one prompt count it once."""
    each = max(1, len(done) // prompts)
    prompt = sum(len(state.request.prompt) for state in done[::each])
    completion = sum(len(state.tokens) for state in done)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
