"""OpenAI Chat Completions: `/v1/chat/completions` and `/v1/models`.

Reads tolerantly, since a dozen harnesses speak this dialect in a dozen accents; answers exactly as the API
reference has it, with `reasoning_content` as the one addition that open-weight servers share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from polar.dialects.base import BadRequest, Dialect, Route, Stream, sse
from polar.dialects.reading import flag, integer, listed, mapping, number, string, wrong
from polar.messages import Answer, Message, ModelRequest, Role, Sampling, Tool, ToolCall

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
REASONING_PARTS = frozenset({"thinking", "reasoning"})
UNHEEDED = ("response_format", "logit_bias", "prediction", "web_search_options", "reasoning_effort", "verbosity")
"""Asked for and not done; kept on the completion as marks."""
ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
MAX_TOKENS = 2**31 - 1
MAX_N = 64


class OpenAIChat(Dialect):
    """See the module."""

    name = "openai_chat"
    routes = (
        Route("/v1/chat/completions"),
        Route("/chat/completions"),
        Route("/v1/models", "GET", "models"),
        Route("/v1/models/{model:path}", "GET", "model"),
    )
    keepalive = b": keep-alive\n\n"

    def secret(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return key.strip()
        return headers.get("api-key")

    def parse(self, body: dict[str, Any], path_params: Mapping[str, str]) -> ModelRequest:
        entries = listed(body.get("messages"), "messages")
        if not entries:
            raise wrong("messages", "must hold at least one message")
        if body.get("functions"):
            raise wrong("functions", "is no longer supported; send tools")
        tools = tuple(_tool(entry, f"tools[{i}]") for i, entry in enumerate(listed(body.get("tools"), "tools")))
        stream, n = flag(body, "stream"), integer(body, "n", 1, MAX_N) or 1
        if stream and n > 1:
            raise wrong("n", "must be 1 when streaming")
        options = body.get("stream_options")
        return ModelRequest(
            model=string(body.get("model"), "model"),
            messages=tuple(_message(entry, f"messages[{i}]") for i, entry in enumerate(entries)),
            tools=tools,
            tool_choice=_tool_choice(body.get("tool_choice")),
            sampling=_sampling(body),
            n=n,
            stream=stream,
            include_usage=options is not None and flag(mapping(options, "stream_options"), "include_usage"),
            want_logprobs=flag(body, "logprobs"),
            marks=_marks(body),
        )

    def answer(self, request: ModelRequest, answers: list[Answer]) -> dict[str, Any]:
        first = answers[0]
        choices = [
            {
                "index": index,
                "message": _served(answer.message),
                "logprobs": _logprobs(answer) if request.want_logprobs else None,
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return {
            "id": _wire_id(first.id),
            "object": "chat.completion",
            "created": first.created,
            "model": first.model,
            "choices": choices,
            "usage": _usage(first.prompt_tokens, sum(answer.completion_tokens for answer in answers)),
        }

    def open_stream(self, request: ModelRequest, completion_id: str) -> Stream:
        return ChatStream(request, completion_id)

    def error(self, status: int, code: str, message: str, *, field: str | None = None) -> dict[str, Any]:
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return sse(self.error(status, code, message))

    def auxiliary(self, kind: str, models: list[dict[str, Any]], path_params: Mapping[str, str]) -> dict[str, Any]:
        cards = [
            {
                "id": model["id"],
                "object": "model",
                "created": 0,
                "owned_by": "polar",
                "max_model_len": model["context_length"],
            }
            for model in models
        ]
        if kind == "models":
            return {"object": "list", "data": cards}
        for card in cards:
            if card["id"] == path_params["model"]:
                return card
        names = ", ".join(card["id"] for card in cards)
        message = f"there is no model {path_params['model']!r} here; there is {names}"
        raise BadRequest(message, field="model", code="model_not_found", status=404)


class ChatStream(Stream):
    """Chunks: the role first, deltas, the finish reason, usage if asked, `[DONE]`."""

    def __init__(self, request: ModelRequest, completion_id: str) -> None:
        self._request = request
        self._head = {
            "id": _wire_id(completion_id),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._opened = False
        self._sent = {"content": "", "reasoning_content": ""}

    def reasoning(self, delta: str) -> Iterator[bytes]:
        yield from self._grow("reasoning_content", delta)

    def text(self, delta: str) -> Iterator[bytes]:
        yield from self._grow("content", delta)

    def finish(self, answer: Answer) -> Iterator[bytes]:
        message = answer.message
        yield from self._open()
        for field, whole in (("reasoning_content", message.reasoning or ""), ("content", message.content)):
            if rest := whole.removeprefix(self._sent[field]):
                yield from self._grow(field, rest)
        for index, call in enumerate(message.tool_calls):
            yield self._chunk({"tool_calls": [{"index": index, **_served_call(call)}]})

    def last(self, answer: Answer) -> Iterator[bytes]:
        logprobs = _logprobs(answer) if self._request.want_logprobs else None
        yield self._chunk({}, answer.finish_reason, logprobs)
        if self._request.include_usage:
            usage = _usage(answer.prompt_tokens, answer.completion_tokens)
            yield sse({**self._head, "choices": [], "usage": usage})
        yield sse(b"[DONE]")

    def _open(self) -> Iterator[bytes]:
        if not self._opened:
            self._opened = True
            yield self._chunk({"role": "assistant", "content": ""})

    def _grow(self, field: str, delta: str) -> Iterator[bytes]:
        yield from self._open()
        self._sent[field] += delta
        yield self._chunk({field: delta})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._request.include_usage else {}
        return sse({**self._head, "choices": [choice], **usage})


def _message(entry: Any, field: str) -> Message:
    entry = mapping(entry, field)
    role = ROLES.get(entry.get("role") if isinstance(entry.get("role"), str) else "")
    if role is None:
        raise wrong(f"{field}.role", f"must be one of {', '.join(ROLES)}, not {entry.get('role')!r}")
    content, thought = _content(entry.get("content"), f"{field}.content")
    reasoning = string(entry.get("reasoning_content"), f"{field}.reasoning_content")
    if not reasoning and isinstance(entry.get("reasoning"), str):
        reasoning = entry["reasoning"]
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        if entry.get("function_call"):
            raise wrong(f"{field}.function_call", "is no longer supported; send tool_calls")
        entries = listed(entry.get("tool_calls"), f"{field}.tool_calls")
        calls = tuple(_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(entries))
        content = content or string(entry.get("refusal"), f"{field}.refusal")
    return Message(
        role=role,
        content=content,
        reasoning=reasoning or thought or None,
        tool_calls=calls,
        tool_call_id=string(entry.get("tool_call_id"), f"{field}.tool_call_id") or None,
        name=string(entry.get("name"), f"{field}.name") or None,
    )


def _content(value: Any, field: str) -> tuple[str, str]:
    """Text and reasoning of a content that is a string, a list of parts, or nothing."""
    if value is None or isinstance(value, str):
        return value or "", ""
    if not isinstance(value, list):
        raise wrong(field, "must be a string or a list of parts")
    texts, thoughts = [], []
    for index, part in enumerate(value):
        where = f"{field}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = mapping(part, where).get("type")
        if kind in TEXT_PARTS:
            name = "refusal" if kind == "refusal" else "text"
            texts.append(string(part.get(name), f"{where}.{name}"))
        elif kind in REASONING_PARTS:
            thoughts.append(string(part.get("thinking") or part.get("text"), where))
        else:
            raise wrong(where, f"parts of type {kind!r} are not supported here; only text is")
    return "\n".join(texts), "\n".join(thoughts)


def _call(entry: Any, field: str) -> ToolCall:
    entry = mapping(entry, field)
    function = mapping(entry.get("function"), f"{field}.function")
    name = string(function.get("name"), f"{field}.function.name")
    if not name:
        raise wrong(f"{field}.function.name", "is missing")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    return ToolCall(string(entry.get("id"), f"{field}.id"), name, string(arguments, f"{field}.function.arguments"))


def _tool(entry: Any, field: str) -> Tool:
    entry = mapping(entry, field)
    if entry.get("type", "function") != "function":
        raise wrong(f"{field}.type", f"tools of type {entry['type']!r} are not supported; only function is")
    function = mapping(entry.get("function"), f"{field}.function")
    name = string(function.get("name"), f"{field}.function.name")
    if not name:
        raise wrong(f"{field}.function.name", "is missing")
    parameters = function.get("parameters")
    return Tool(
        name=name,
        description=string(function.get("description"), f"{field}.function.description"),
        parameters={} if parameters is None else mapping(parameters, f"{field}.function.parameters"),
        raw=function,
    )


def _tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    if value in ("auto", "none", "required"):
        return str(value)
    function = mapping(value, "tool_choice").get("function")
    return string(mapping(function, "tool_choice.function").get("name"), "tool_choice.function.name")


def _sampling(body: dict[str, Any]) -> Sampling:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else listed(stop, "stop")
    newer = integer(body, "max_completion_tokens", 1, MAX_TOKENS)
    return Sampling(
        temperature=number(body, "temperature", 0, 5),
        top_p=number(body, "top_p", 0, 1) or None,
        top_k=integer(body, "top_k", -1, MAX_TOKENS),
        min_p=number(body, "min_p", 0, 1),
        presence_penalty=number(body, "presence_penalty", -2, 2),
        frequency_penalty=number(body, "frequency_penalty", -2, 2),
        repetition_penalty=number(body, "repetition_penalty", 0, 10),
        seed=integer(body, "seed", -(2**63), 2**63 - 1),
        max_tokens=newer or integer(body, "max_tokens", 1, MAX_TOKENS),
        stop=tuple(string(text, f"stop[{i}]") for i, text in enumerate(stops) if text),
    )


def _marks(body: dict[str, Any]) -> tuple[str, ...]:
    marks = [name for name in UNHEEDED if body.get(name)]
    if body.get("top_logprobs"):
        marks.append("top_logprobs")
    if body.get("tool_choice") not in (None, "auto", "none"):
        marks.append("tool_choice")
    return tuple(marks)


def _served(message: Message) -> dict[str, Any]:
    served: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
    if message.reasoning:
        served["reasoning_content"] = message.reasoning
    if message.tool_calls:
        served["tool_calls"] = [_served_call(call) for call in message.tool_calls]
    elif served["content"] is None:
        served["content"] = ""
    return served


def _served_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(answer: Answer) -> dict[str, Any]:
    pairs = zip(answer.token_texts, answer.logprobs, strict=True)
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
    ]
    return {"content": content, "refusal": None}


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _wire_id(completion_id: str) -> str:
    return "chatcmpl-" + completion_id.rpartition("-")[2]
