"""One engine behind HTTP: the application that joins both surfaces, and the function that serves it.

Handlers are in `sglang_api` and `vllm_api`; this module starts and stops things.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from polar.tiny_engine import MODEL_DIR
from polar.tiny_engine.engine import TinyEngine, load_tokenizer
from polar.tiny_engine.requests import Engine
from polar.tiny_engine.scripted import ScriptedEngine, ScriptFile
from polar.tiny_engine.sglang_api import SGLangSurface
from polar.tiny_engine.vllm_api import VLLMSurface
from polar.tiny_engine.wire import BadRequest, error_response


def make_engine(
    model_dir: Path | None = None,
    script: Path | None = None,
    name: str | None = None,
    latency_seconds: float = 0.0,
) -> Engine:
    """The scripted engine if a script is given, else the numpy one; the scripted one borrows the tokenizer."""
    directory = model_dir or MODEL_DIR
    if script is None:
        return TinyEngine(directory, name)
    # Its model path is where the tokenizer is, so that a client can load the same one.
    return ScriptedEngine(
        ScriptFile.load(script), load_tokenizer(directory), name, latency_seconds, model_path=str(directory)
    )


async def _health(http: HTTPRequest) -> Response:
    return PlainTextResponse("")


async def _on_http_error(http: HTTPRequest, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response("internal error", None, 500)
    return error_response(error.detail, error.field if isinstance(error, BadRequest) else None, error.status_code)


def build_app(engine: Engine) -> Starlette:
    """The application over an engine, which is closed with it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    return Starlette(
        routes=[
            Route("/health", _health, methods=["GET"]),
            *SGLangSurface(engine).routes(),
            *VLLMSurface(engine).routes(),
        ],
        exception_handlers={HTTPException: _on_http_error, Exception: _on_http_error},
        lifespan=lifespan,
    )


def serve(
    model_dir: Path | None = None,
    script: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 30000,
    name: str | None = None,
    latency_seconds: float = 0.0,
) -> None:
    """Serve until interrupted."""
    app = build_app(make_engine(model_dir, script, name, latency_seconds))
    # Clients keep idle connections for longer than uvicorn's five seconds, and then write into a closed one.
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_keep_alive=120, timeout_graceful_shutdown=2)
