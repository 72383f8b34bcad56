"""A router in front of an engine that keeps only the fields it knows: token ids do not come through.

`python -m tests.fakes.router --engine URL --port N [--spare-probes]`; with the flag, requests that are probes pass as
they are, as behind a router that was put in front of an engine which had been looked at before.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STRIPPED = frozenset({"output_ids", "token_ids", "response_token_ids", "tokens"})


def stripped(value: Any) -> Any:
    """The same without the ids of what was sampled."""
    if isinstance(value, dict):
        return {name: stripped(item) for name, item in value.items() if name not in STRIPPED}
    return [stripped(item) for item in value] if isinstance(value, list) else value


def build_app(engine: str, spare_probes: bool) -> Starlette:
    """The application."""

    async def forward(request: Request) -> Response:
        body = await request.body()
        async with httpx.AsyncClient(timeout=60) as http:
            reply = await http.request(request.method, engine + request.url.path, content=body)
        content = reply.content
        if request.method == "POST" and not (spare_probes and b'"probe-' in body):
            lines = content.split(b"\n")
            if not reply.headers["content-type"].startswith("text/event-stream"):
                lines = [content]
            content = b"\n".join(map(_line, lines))
        return Response(content, reply.status_code, media_type=reply.headers["content-type"])

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


def _line(line: bytes) -> bytes:
    prefix = b"data: " if line.startswith(b"data: ") else b""
    data = line[len(prefix) :]
    return prefix + json.dumps(stripped(json.loads(data))).encode() if data.startswith((b"{", b"[{")) else line


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--spare-probes", action="store_true")
    arguments = parser.parse_args()
    uvicorn.run(build_app(arguments.engine, arguments.spare_probes), port=arguments.port, log_level="warning")
