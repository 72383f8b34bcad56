"""The Response object of the Responses API, whole: what was said, as items, and what was asked, repeated.

The stream sends the same items one by one and this object at its end, so both are made here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from polar.dialects import responses_tools, seals
from polar.dialects.responses_input import items_of, kept, summarises
from polar.messages import Answer, ModelRequest

COMPACTION = "response.compaction"
"""The kind of object that the compact route answers with; written into its recorded body."""
ECHOED: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the answer repeats, with what they are where the request has none."""
FAILURES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Codes of the API's own list, for errors whose codes are not on it."""
OVERFLOW = "context_length_exceeded"


def compacts(request: ModelRequest) -> bool:
    """Whether the answer is to be a summary of the conversation, sealed."""
    return summarises(request.raw.get("input"))


def response_id(completion_id: str) -> str:
    """The id of the whole answer."""
    return seals.item_id("resp", completion_id)


def whole(request: ModelRequest, answer: Answer, created: int | None = None) -> dict[str, Any]:
    """The finished answer."""
    if compacts(request) and request.raw.get("object") == COMPACTION:
        return {
            "id": response_id(answer.id),
            "object": COMPACTION,
            "created_at": answer.created,
            "output": [*kept(items_of(request.raw.get("input"))), *output(request, answer)],
            "usage": usage(answer),
        }
    cut = answer.finish_reason == "length"
    return {
        **opened(request, answer.id, answer.created if created is None else created),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "completed_at": int(time.time()),
        "output": output(request, answer),
        "usage": usage(answer),
    }


def opened(request: ModelRequest, completion_id: str, created: int) -> dict[str, Any]:
    """The answer before anything is in it."""
    asked = {name: request.raw.get(name) for name in ECHOED}
    return {
        "id": response_id(completion_id),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        **{name: default if asked[name] is None else asked[name] for name, default in ECHOED.items()},
    }


def failed(request: ModelRequest, completion_id: str, created: int, error: dict[str, Any]) -> dict[str, Any]:
    """The answer that broke off."""
    return {**opened(request, completion_id, created), "status": "failed", "error": error}


def failure(status: int, code: str, message: str) -> dict[str, Any]:
    """The error inside an answer. Clients look for the one code by which they know an overflow."""
    return {"code": code if code == OVERFLOW else FAILURES.get(status, "server_error"), "message": message}


def output(request: ModelRequest, answer: Answer) -> list[dict[str, Any]]:
    """The items of an answer, in order."""
    said, calls = answer.message, answer.message.tool_calls
    if compacts(request):
        return [compaction(answer.id, said.content)]
    items: list[dict[str, Any]] = []
    if said.reasoning:
        items.append(reasoning(request, answer.id, said.reasoning))
    if said.content or not (calls or said.reasoning):
        items.append(message(answer.id, said.content, status(answer), logprobs(request, answer)))
    return [*items, *(responses_tools.item(request, call, answer.id, index) for index, call in enumerate(calls))]


def status(answer: Answer) -> str:
    """Of the message of an answer: what calls follow is whole."""
    return "incomplete" if answer.finish_reason == "length" and not answer.message.tool_calls else "completed"


def compaction(completion_id: str, summary: str) -> dict[str, Any]:
    """A summary that only we can read."""
    id_ = seals.item_id("cmp", completion_id)
    return {"id": id_, "type": "compaction", "encrypted_content": seals.seal(completion_id, summary)}


def reasoning(request: ModelRequest, completion_id: str, text: str) -> dict[str, Any]:
    """Reasoning in the form that was asked for, sealed too if that was."""
    asked = summarised(request)
    item: dict[str, Any] = {
        "id": seals.item_id("rs", completion_id),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if asked else [],
    }
    if not asked:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if included(request, "reasoning.encrypted_content"):
        item["encrypted_content"] = seals.seal(completion_id, text)
    return item


def message(completion_id: str, text: str, status: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """The text of an answer."""
    return {
        "id": seals.item_id("msg", completion_id),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}],
    }


def logprobs(request: ModelRequest, answer: Answer) -> list[dict[str, Any]]:
    """Of every sampled token, those of reasoning and calls included, since they are sampled as one."""
    if not request.want_logprobs:
        return []
    pairs = zip(answer.token_texts, answer.logprobs, strict=True)
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
    ]


def usage(answer: Answer) -> dict[str, Any]:
    """The accounting of an answer."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def summarised(request: ModelRequest) -> bool:
    """Whether a summary of the reasoning was asked for. It is the reasoning itself: nobody here could write another."""
    asked = request.raw.get("reasoning")
    return isinstance(asked, dict) and bool(asked.get("summary") or asked.get("generate_summary"))


def included(request: ModelRequest, name: str) -> bool:
    """Whether `include` asks for it."""
    return name in (request.raw.get("include") or ())
