"""OpenAI Chat Completions: `/v1/chat/completions` and `/v1/models`.

Reads tolerantly, since a dozen harnesses speak this dialect in a dozen accents; answers exactly as the API
reference has it, with `reasoning_content` as the one addition that open-weight servers share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from polar.dialects import openai_wire, tools
from polar.dialects.base import Dialect, Route, Stream, sse
from polar.dialects.content import Content, split_data_url
from polar.dialects.reading import ANY_OBJECT, flag, integer, listed, mapping, number, required, string, wrong
from polar.messages import Answer, Message, ModelRequest, Role, Sampling, Tool, ToolCall, plain_message

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
REASONING_PARTS = frozenset({"thinking", "reasoning"})
UNHEEDED = ("logit_bias", "prediction", "web_search_options", "reasoning_effort", "verbosity", "modalities", "audio")
"""Asked for and not done; kept on the completion as marks."""
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
        return openai_wire.secret(headers)

    def parse(self, body: dict[str, Any], params: Mapping[str, str]) -> ModelRequest:
        entries = listed(body.get("messages"), "messages")
        if not entries:
            raise wrong("messages", "must hold at least one message")
        if body.get("functions"):
            raise wrong("functions", "is no longer supported; send tools")
        offered = [_tool(entry, f"tools[{i}]") for i, entry in enumerate(listed(body.get("tools"), "tools"))]
        options = body.get("stream_options")
        marks = _marks(body)
        return ModelRequest(
            model=required(body, "model"),
            messages=tuple(_message(entry, f"messages[{i}]", marks) for i, entry in enumerate(entries)),
            tools=tuple(offered),
            tool_choice=_tool_choice(body.get("tool_choice")),
            sampling=_sampling(body),
            n=integer(body, "n", 1, MAX_N) or 1,
            stream=flag(body, "stream"),
            include_usage=options is not None and flag(mapping(options, "stream_options"), "include_usage"),
            want_logprobs=flag(body, "logprobs"),
            marks=tuple(dict.fromkeys(marks)),
            raw=body,
        )

    def answer(self, request: ModelRequest, answers: list[Answer]) -> dict[str, Any]:
        first = answers[0]
        choices = [
            {
                "index": index,
                "message": _served(answer.message, request),
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
            "usage": _usage(answers),
        }

    def open_stream(self, request: ModelRequest, completion_id: str) -> Stream:
        return ChatStream(request, completion_id)

    def error(self, status: int, code: str, message: str, *, field: str | None = None) -> dict[str, Any]:
        return openai_wire.error(status, code, message, field)

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return sse(self.error(status, code, message))

    def models(self, kind: str, models: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
        return openai_wire.models(kind, models, params)


class ChatStream(Stream):
    """Chunks: the role first, deltas, the finish reason, usage if asked, `[DONE]`."""

    def __init__(self, request: ModelRequest, completion_id: str) -> None:
        super().__init__(request, completion_id)
        self._head = {
            "id": _wire_id(completion_id),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._choice = 0

    def finish(self, answers: list[Answer]) -> Iterator[bytes]:
        yield from super().finish(answers)
        for index, answer in enumerate(answers[1:], 1):
            # Only the first of several samples is streamed as it comes; the others follow it whole.
            self._choice = index
            self._started = False
            self._sent_reasoning = self._sent_text = self._sent_calls = 0
            yield from super().finish([answer])

    def last(self, answers: list[Answer]) -> Iterator[bytes]:
        for index, answer in enumerate(answers):
            self._choice = index
            logprobs = _logprobs(answer) if self.request.want_logprobs else None
            yield self._chunk({}, answer.finish_reason, logprobs)
        if self.request.include_usage:
            yield sse({**self._head, "choices": [], "usage": _usage(answers)})
        yield sse(b"[DONE]")

    def _start(self, prompt_tokens: int) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def _reasoning(self, delta: str) -> Iterator[bytes]:
        yield self._chunk({"reasoning_content": delta})

    def _text(self, delta: str) -> Iterator[bytes]:
        yield self._chunk({"content": delta})

    def _call(self, index: int, call: ToolCall) -> Iterator[bytes]:
        served = _served_call(call, self.request)
        body = served[served["type"]]
        written = "arguments" if "arguments" in body else "input"
        opened = {**served, served["type"]: {**body, written: ""}}
        yield self._chunk({"tool_calls": [{"index": index, **opened}]})
        delta = {"index": index, served["type"]: {written: body[written]}}
        yield self._chunk({"tool_calls": [delta]})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": self._choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.request.include_usage else {}
        return sse({**self._head, "choices": [choice], **usage})


def _message(entry: Any, field: str, marks: list[str]) -> Message:
    entry = mapping(entry, field)
    role = ROLES.get(entry.get("role") if isinstance(entry.get("role"), str) else "")
    if role is None:
        raise wrong(f"{field}.role", f"must be one of {', '.join(ROLES)}, not {entry.get('role')!r}")
    text = entry.get("content")
    if isinstance(text, str) and len(entry) == 2:
        return plain_message(role, text)  # a role and a text, as most are
    content, thought = _content(text, f"{field}.content")
    marks += content.marks
    text = content.text
    reasoning = string(entry.get("reasoning_content"), f"{field}.reasoning_content")
    if not reasoning and isinstance(entry.get("reasoning"), str):
        reasoning = entry["reasoning"]
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        if entry.get("function_call"):
            raise wrong(f"{field}.function_call", "is no longer supported; send tool_calls")
        entries = listed(entry.get("tool_calls"), f"{field}.tool_calls")
        calls = tuple(_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(entries))
        text = text or string(entry.get("refusal"), f"{field}.refusal")
    return Message(
        role=role,
        content=text,
        images=tuple(content.images),
        reasoning=reasoning or thought or None,
        tool_calls=calls,
        tool_call_id=string(entry.get("tool_call_id"), f"{field}.tool_call_id") or None,
        name=string(entry.get("name"), f"{field}.name") or None,
    )


def _content(value: Any, field: str) -> tuple[Content, str]:
    """Content and reasoning of what is a string, a list of parts, or nothing."""
    content, thoughts = Content(), []
    if value is None or isinstance(value, str):
        content.add(value or "")
        return content, ""
    if not isinstance(value, list):
        raise wrong(field, "must be a string or a list of parts")
    for index, part in enumerate(value):
        where = f"{field}[{index}]"
        if isinstance(part, str):
            content.add(part)
        elif string(mapping(part, where).get("type"), f"{where}.type") in REASONING_PARTS:
            thoughts.append(string(part.get("thinking") or part.get("text"), where))
        else:
            _part(content, part, where)
    return content, "\n".join(thoughts)


def _part(content: Content, part: dict[str, Any], where: str) -> None:
    kind = part.get("type")
    if kind in TEXT_PARTS:
        name = "refusal" if kind == "refusal" else "text"
        content.add(string(part.get(name), f"{where}.{name}"))
    elif kind in ("image_url", "input_image"):
        image = part.get("image_url")
        url = image if isinstance(image, str) else string(mapping(image, f"{where}.image_url").get("url"), where)
        if not url:
            raise wrong(f"{where}.image_url.url", "is missing")
        content.picture(url)
    elif kind == "file":
        file = mapping(part.get("file"), f"{where}.file")
        name = string(file.get("filename"), f"{where}.file.filename") or "file"
        data = string(file.get("file_data"), f"{where}.file.file_data")
        media_type, data = split_data_url(data) or ("", data)
        content.document(name, media_type, data)
    elif kind == "input_audio":
        content.unread("audio")
    else:
        known = "text, image_url, input_audio, file and refusal"
        raise wrong(f"{where}.type", f"parts of type {kind!r} are unknown; there are {known}")


def _call(entry: Any, field: str) -> ToolCall:
    entry = mapping(entry, field)
    id_ = string(entry.get("id"), f"{field}.id")
    if entry.get("type") == "custom":
        custom = mapping(entry.get("custom"), f"{field}.custom")
        text = string(custom.get("input"), f"{field}.custom.input")
        return ToolCall(id_, required(custom, "name", f"{field}.custom."), tools.freeform_arguments(text))
    function = mapping(entry.get("function"), f"{field}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = orjson.dumps(arguments).decode()
    name = required(function, "name", f"{field}.function.")
    return ToolCall(id_, name, string(arguments, f"{field}.function.arguments"))


def _tool(entry: Any, field: str) -> Tool:
    entry = mapping(entry, field)
    kind = entry.get("type", "function")
    if kind == "custom":
        custom = mapping(entry.get("custom"), f"{field}.custom")
        form = custom.get("format")
        grammar = mapping(form, f"{field}.custom.format").get("grammar") if form is not None else None
        return tools.freeform(
            required(custom, "name", f"{field}.custom."),
            string(custom.get("description"), f"{field}.custom.description"),
            mapping(grammar, f"{field}.custom.format.grammar") if grammar is not None else None,
        )
    if kind != "function":
        raise wrong(f"{field}.type", f"tools of type {kind!r} are unknown; there are function and custom")
    function = mapping(entry.get("function"), f"{field}.function")
    parameters = function.get("parameters")
    return Tool(
        name=required(function, "name", f"{field}.function."),
        description=string(function.get("description"), f"{field}.function.description"),
        parameters={} if parameters is None else mapping(parameters, f"{field}.function.parameters"),
        raw=function,
    )


def _tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    if value in ("auto", "none", "required"):
        return str(value)
    value = mapping(value, "tool_choice")
    if value.get("type") == "allowed_tools":
        allowed = mapping(value.get("allowed_tools"), "tool_choice.allowed_tools")
        return _tool_choice(allowed.get("mode"))
    kind = "custom" if value.get("type") == "custom" else "function"
    return required(mapping(value.get(kind), f"tool_choice.{kind}"), "name", f"tool_choice.{kind}.")


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
        json_schema=_json_schema(body.get("response_format")),
    )


def _json_schema(value: Any) -> str | None:
    if value is None:
        return None
    form = mapping(value, "response_format")
    kind = form.get("type")
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json_schema":
        inner = mapping(form.get("json_schema"), "response_format.json_schema")
        schema = inner.get("schema")
        return orjson.dumps(mapping(schema, "response_format.json_schema.schema")).decode() if schema else ANY_OBJECT
    if kind in (None, "text"):
        return None
    raise wrong("response_format.type", f"must be text, json_object or json_schema, not {kind!r}")


def _marks(body: dict[str, Any]) -> list[str]:
    marks = [name for name in UNHEEDED if body.get(name)]
    if body.get("top_logprobs"):
        marks.append("top_logprobs")
    if body.get("tool_choice") not in (None, "auto", "none"):
        marks.append("tool_choice")
    return marks


def _served(message: Message, request: ModelRequest) -> dict[str, Any]:
    served: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
    if message.reasoning:
        served["reasoning_content"] = message.reasoning
    if message.tool_calls:
        served["tool_calls"] = [_served_call(call, request) for call in message.tool_calls]
    elif served["content"] is None:
        served["content"] = ""
    return served


def _served_call(call: ToolCall, request: ModelRequest) -> dict[str, Any]:
    kind, name, _ = tools.offered_kind(request, call)
    if kind == "custom":
        return {"id": call.id, "type": "custom", "custom": {"name": name, "input": tools.freeform_input(call)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(answer: Answer) -> dict[str, Any]:
    pairs = zip(answer.token_texts, answer.logprobs, strict=True)
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
    ]
    return {"content": content, "refusal": None}


def _usage(answers: list[Answer]) -> dict[str, Any]:
    prompt, sampled = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    thought = sum(answer.reasoning_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def _wire_id(completion_id: str) -> str:
    return "chatcmpl-" + completion_id.rpartition("-")[2]
