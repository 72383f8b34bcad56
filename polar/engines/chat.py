"""The chat-completions wire seen from its client: messages to a body, and a reply to a Generation with its message.

For canonical mode, where the engine renders and parses. Token ids are read wherever servers are known to put them;
a server that gives none is no error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polar.engines.base import Generation
from polar.errors import EngineError
from polar.messages import FinishReason, Message, ModelRequest, ToolCall

FINISH: Mapping[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "content_filter": "stop",
    "length": "length",
    "abort": "abort",
}


def chat_body(request: ModelRequest) -> dict[str, Any]:
    """Messages and tools; sampling and the server's own fields are added by the adapter."""
    messages = []
    for message in request.messages:
        form = message.chat_form()
        form.pop("is_error", None)
        if message.images:
            form["content"] = _parts(message)
        messages.append(form)
    body: dict[str, Any] = {"messages": messages, "stream": False}
    if request.tools and request.tool_choice != "none":
        body["tools"] = [
            {
                "type": "function",
                "function": tool.raw
                or {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in request.tools
        ]
    return body


def _parts(message: Message) -> list[dict[str, Any]]:
    """Text and pictures in their order; the pictures themselves, where what is kept has references to them."""
    parts: list[dict[str, Any]] = []
    place = 0
    for image in message.images:
        if before := message.content[place : image.start]:
            parts.append({"type": "text", "text": before})
        parts.append({"type": "image_url", "image_url": {"url": image.source}})
        place = image.end
    rest = message.content[place:]
    return [*parts, {"type": "text", "text": rest}] if rest else parts


def read_chat(value: dict[str, Any]) -> Generation:
    """The first choice. Raises EngineError."""
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise EngineError("the engine's answer has no message", code="engine_contract")
    kind = FINISH.get(choice.get("finish_reason") or "stop")
    if kind is None:
        raise EngineError(f"the engine's finish_reason {choice['finish_reason']!r} is unknown", code="engine_contract")
    meta = choice.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs") or []
    ids = _ids(choice.get("token_ids")) or _ids(choice.get("response_token_ids")) or [pair[1] for pair in pairs]
    entries = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [float(entry["logprob"]) for entry in entries if isinstance(entry, dict) and "logprob" in entry]
    if pairs and len(pairs) == len(ids):
        logprobs = [float(pair[0]) for pair in pairs]
    prompt = _ids(value.get("prompt_token_ids")) or _ids(choice.get("prompt_token_ids"))
    usage = value.get("usage") or {}
    return Generation(
        output_ids=ids,
        logprobs=logprobs if ids and len(logprobs) == len(ids) else None,
        finish_reason=kind,
        matched_stop=choice.get("stop_reason"),
        prompt_ids=prompt,
        prompt_tokens=len(prompt) if prompt else usage.get("prompt_tokens"),
        policy_versions=meta.get("weight_versions") or choice.get("weight_versions") or [],
        message=_message(choice["message"]),
        output_tokens=len(ids) or usage.get("completion_tokens"),
    )


def _message(value: dict[str, Any]) -> Message:
    calls = []
    for call in value.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(ToolCall("", str(function.get("name") or ""), str(function.get("arguments") or "")))
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    return Message("assistant", value.get("content") or "", reasoning or None, tuple(calls))


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and value and all(type(token) is int for token in value) else None
