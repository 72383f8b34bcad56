"""Anthropic Messages: `/v1/messages`, `/v1/messages/count_tokens`, and Anthropic's form of `/v1/models`.

Reads what Claude Code and Anthropic's own clients send, beta or not; what is answered fits their types. How the
history is read, which tools are offered and how an answer is written stand in files of their own beside this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from polar.dialects.anthropic_answers import MessagesStream, written
from polar.dialects.anthropic_history import conversation
from polar.dialects.anthropic_tools import tool_choice, toolbox
from polar.dialects.base import BadRequest, Dialect, Earlier, Route, Stream, sse
from polar.dialects.reading import ANY_OBJECT, flag, integer, listed, mapping, number, required, string, wrong
from polar.messages import Answer, ModelRequest, Sampling

UNHEEDED = ("container", "mcp_servers", "context_management", "fallbacks", "compaction")
"""Asked for and not done; kept on the completion as marks."""
ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
OVERFLOW = re.compile(r"context length is (\d+) tokens.*resulted in (\d+) tokens", re.DOTALL)
BATCHES = "/v1/messages/batches{rest:path}"
THREAD_NOT_FOUND = "thread_not_found"
EPOCH = "1970-01-01T00:00:00Z"
"""What Anthropic gives for a model whose date of release is not known."""
MAX_TOKENS = 2**31 - 1


class AnthropicMessages(Dialect):
    """See the module."""

    name = "anthropic_messages"
    routes = (
        Route("/v1/messages"),
        Route("/v1/messages/count_tokens", kind="count", fixed={"counted": "true"}),
        Route(BATCHES, "POST", "absent"),
        Route(BATCHES, "GET", "absent"),
        Route("/v1/models", "GET", "models"),
        Route("/v1/models/{model:path}", "GET", "model"),
        Route("/api/hello", "GET", "hello"),
    )
    keepalive = b'event: ping\ndata: {"type": "ping"}\n\n'
    REQUEST_ID = "request-id"

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers

    def secret(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        if key := headers.get("x-api-key", "").strip():
            return key
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return (key.strip() or None) if scheme.lower() == "bearer" else None

    def parse(self, body: dict[str, Any], params: Mapping[str, str]) -> ModelRequest:
        marks: list[str] = []
        model = required(body, "model")
        box = toolbox(listed(body.get("tools"), "tools"), marks)
        return ModelRequest(
            model=model,
            messages=conversation(body, box, marks),
            tools=tuple(box.offered),
            tool_choice=tool_choice(body.get("tool_choice"), box, marks),
            sampling=_sampling(body, counted="counted" in params),
            stream=flag(body, "stream"),
            include_usage=True,
            marks=tuple(dict.fromkeys([*marks, *_marks(body)])),
            raw=body,
        )

    def cites(self, body: dict[str, Any]) -> Sequence[str]:
        previous = _continued(body)
        return () if previous is None else (previous,)

    def whole(self, body: dict[str, Any], params: Mapping[str, str], cited: Mapping[str, Earlier]) -> dict[str, Any]:
        previous = _continued(body)
        if previous is None:
            return body
        if previous not in cited:
            message = f"thread.previous_message_id: there is no message {previous!r} in this session"
            raise BadRequest(message, field="thread.previous_message_id", code=THREAD_NOT_FOUND, status=404)
        asked, answered = cited[previous].asked(), cited[previous].answered()
        # What a thread was created with holds for all of it; a turn says only what is its own.
        kept: dict[str, Any] = {name: asked[name] for name in ("system", "tools") if name in asked}
        before = [*asked["messages"], {"role": "assistant", "content": answered["content"]}]
        added = listed(body.get("messages"), "messages")
        return {**kept, **body, "messages": [*before, *added], "thread": {"type": "create"}}

    def answer(self, request: ModelRequest, answers: list[Answer]) -> dict[str, Any]:
        return written(request, answers[0])

    def open_stream(self, request: ModelRequest, completion_id: str) -> Stream:
        return MessagesStream(request, completion_id)

    def status(self, status: int, code: str) -> int:
        return 529 if status == 503 else status

    def error(self, status: int, code: str, message: str, *, field: str | None = None) -> dict[str, Any]:
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        if code == "context_length_exceeded":
            message = _too_long(message)
        # By this code a client of a thread knows that it must send the whole conversation.
        details = {"details": {"error_code": code}} if code == THREAD_NOT_FOUND else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return sse(self.error(status, code, message), "error")

    def models(self, kind: str, models: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
        cards = [
            {
                "type": "model",
                "id": model["id"],
                "display_name": model["id"],
                "created_at": EPOCH,
                "lifecycle": "active",
                "max_input_tokens": model["context_length"],
            }
            for model in models
        ]
        names = [card["id"] for card in cards]
        if kind == "models":
            ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
            return {"data": cards, "has_more": False, **ends}
        for card in cards:
            if card["id"] == params["model"]:
                return card
        message = f"model: there is no {params['model']!r} here; there is {', '.join(names)}"
        raise BadRequest(message, field="model", code="model_not_found", status=404)

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}


def _continued(body: dict[str, Any]) -> str | None:
    """The message whose thread the body goes on with."""
    thread = body.get("thread")
    if thread is None or mapping(thread, "thread").get("type") == "create":
        return None
    return required(thread, "previous_message_id", "thread.")


def _sampling(body: dict[str, Any], *, counted: bool) -> Sampling:
    if not counted and body.get("max_tokens") is None:
        raise wrong("max_tokens", "Field required")
    stops = listed(body.get("stop_sequences"), "stop_sequences")
    return Sampling(
        temperature=number(body, "temperature", 0, 5),
        top_p=number(body, "top_p", 0, 1) or None,
        top_k=integer(body, "top_k", -1, MAX_TOKENS) or None,
        max_tokens=integer(body, "max_tokens", 1, MAX_TOKENS),
        stop=tuple(string(text, f"stop_sequences[{i}]") for i, text in enumerate(stops) if text),
        json_schema=_json_schema(body),
    )


def _json_schema(body: dict[str, Any]) -> str | None:
    config = body.get("output_config")
    form, field = body.get("output_format"), "output_format"
    if config is not None and mapping(config, "output_config").get("format") is not None:
        form, field = config["format"], "output_config.format"
    if form is None:
        return None
    kind = mapping(form, field).get("type")
    if kind != "json_schema":
        raise wrong(f"{field}.type", f"must be json_schema, not {kind!r}")
    schema = form.get("schema")
    return orjson.dumps(mapping(schema, f"{field}.schema")).decode() if schema else ANY_OBJECT


def _marks(body: dict[str, Any]) -> list[str]:
    """What of the request's settings nothing is done about. Adaptive thinking asks for nothing: a model thinks or
    does not, as it was trained."""
    marks = [name for name in UNHEEDED if body.get(name)]
    thinking, config = body.get("thinking"), body.get("output_config")
    if thinking is not None and mapping(thinking, "thinking").get("type") != "adaptive":
        marks.append("thinking")
    if isinstance(config, dict):
        marks += [name for name in ("effort", "task_budget") if config.get(name)]
    return marks


def _too_long(message: str) -> str:
    """In the words by which Claude Code knows that it must compact, with both numbers where they are known."""
    found = OVERFLOW.search(message)
    if found is None:
        return f"prompt is too long: {message}"
    tokens = int(found[2])
    # A prompt that leaves room for no answer is refused too, though it is not longer than the context.
    return f"prompt is too long: {tokens} tokens > {min(int(found[1]), tokens - 1)} maximum"
