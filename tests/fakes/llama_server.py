"""llama-server over the tiny engine: `python -m tests.fakes.llama_server --port N`.

Fields and their meaning follow llama.cpp's own documentation of its server; inference is the tiny engine's. The chat
endpoint is the tiny engine's own.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from polar.tiny_engine.requests import Completion, Engine, Request
from polar.tiny_engine.sampling import SamplingParams
from polar.tiny_engine.server import make_engine
from polar.tiny_engine.vllm_api import VLLMSurface
from polar.tiny_engine.wire import complete_all, json_response, prompts_of, read_body


class Body(BaseModel):
    """The fields of /completion that Polar sends, with llama-server's own defaults."""

    model_config = ConfigDict(extra="ignore")
    prompt: list[int] | str
    n_predict: int = -1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.1
    seed: int = -1
    stop: list[str] = Field(default_factory=list)
    n_probs: int = 0
    return_tokens: bool = False
    post_sampling_probs: bool = False


class Server:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def props(self, http: HTTPRequest) -> Response:
        """What is served; `scripted` is the tiny engine's own word."""
        info = self.engine.info
        return json_response(
            {
                "default_generation_settings": {"n_ctx": info.context_length},
                "model_alias": info.name,
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "build_info": "b0-fake",
                "modalities": {"vision": False},
                "scripted": info.scripted,
            }
        )

    async def models(self, http: HTTPRequest) -> Response:
        """The one model."""
        return json_response({"data": [{"id": self.engine.info.name, "object": "model"}]})

    async def completion(self, http: HTTPRequest) -> Response:
        """Continue text or ids."""
        body = await read_body(http, Body)
        if body.repeat_penalty != 1.0:
            raise HTTPException(400, "this fake does not penalise")
        ids = prompts_of(self.engine, body.prompt, "prompt")[0][0]
        room = self.engine.info.context_length - len(ids)
        if room <= 0:
            message = "the request exceeds the available context size, try increasing it"
            error = {"code": 400, "message": message, "type": "exceed_context_size_error"}
            return json_response({"error": error}, 400)
        params = SamplingParams(
            max_new_tokens=room if body.n_predict < 0 else min(room, body.n_predict),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=None if body.seed < 0 else body.seed,
            stop=tuple(body.stop),
        )
        (done,) = await complete_all(http, self.engine, [Request(ids, params)])
        return json_response(self._answer(body, done))

    def _answer(self, body: Body, done: Completion) -> dict[str, Any]:
        matched = done.finish.matched if done.finish else None
        kind = done.finish.kind if done.finish else None
        word = isinstance(matched, str)
        probs = [
            {"id": t.id, **({"prob": math.exp(t.logprob)} if body.post_sampling_probs else {"logprob": t.logprob})}
            for t in done.tokens
        ]
        return {
            "content": done.text(self.engine.tokenizer),
            "tokens": done.ids if body.return_tokens else [],
            "stop": True,
            "stop_type": {"length": "limit", "abort": "none"}.get(kind or "", "word" if word else "eos"),
            "stopping_word": matched if word else "",
            "tokens_predicted": len(done.tokens),
            "tokens_evaluated": len(done.request.prompt),
            "truncated": False,
            **({"completion_probabilities": probs} if body.n_probs else {}),
        }


async def _health(http: HTTPRequest) -> Response:
    return json_response({"status": "ok"})


async def _error(http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"error": {"code": error.status_code, "message": error.detail}}, error.status_code)


def build_app(engine: Engine) -> Starlette:
    """The application."""
    server = Server(engine)
    routes = [
        Route("/health", _health),
        Route("/props", server.props),
        Route("/v1/models", server.models),
        Route("/completion", server.completion, methods=["POST"]),
        Route("/v1/chat/completions", VLLMSurface(engine).chat, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _error})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    app = build_app(make_engine(arguments.model, arguments.script))
    uvicorn.run(app, port=arguments.port, log_level="warning")
