"""Answers as Google writes them: candidates of parts, whole or chunk by chunk, as events or as one long JSON array.

Every turn carries one signature: on its first function call, else on its last text. Clients must send it back,
and it names the completion with its reasoning, whether or not that was shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from polar.dialects import seals
from polar.dialects.base import Dialect, Stream, sse
from polar.messages import Answer, ModelRequest, ToolCall

FINISHED: Mapping[str, str] = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "abort": "OTHER"}


def whole(answers: list[Answer], *, thoughts: bool, logprobs: bool) -> dict[str, Any]:
    """A finished answer of one or more candidates."""
    candidates = [
        {
            "content": {"role": "model", "parts": _parts(answer, thoughts=thoughts)},
            **_ended(answer, index, logprobs=logprobs),
        }
        for index, answer in enumerate(answers)
    ]
    return {"candidates": candidates, **_told(answers), **_named(answers[0].id, answers[0].model)}


@dataclass(slots=True)
class _Candidate:
    """What of one candidate is on its way."""

    id: str
    thoughts: str = ""
    held: str = ""
    """The last text, which is held back until it is known whether the signature goes on it."""
    signed: bool = False

    def sign(self) -> dict[str, str]:
        """The signature, on the first part that asks for it."""
        if self.signed:
            return {}
        self.signed = True
        return {"thoughtSignature": seals.seal(self.id, self.thoughts)}


class GenerateStream(Stream):
    """`?alt=sse`: one event for each chunk, and nothing after the last."""

    def __init__(self, request: ModelRequest, completion_id: str, *, thoughts: bool) -> None:
        super().__init__(request, completion_id)
        self._shows = thoughts
        self._candidates = [_Candidate(completion_id)]

    def finish(self, answers: list[Answer]) -> Iterator[bytes]:
        yield from super().finish(answers)
        for answer in answers[1:]:
            # Only the first of several samples is streamed as it comes; the others follow it whole.
            self._candidates.append(_Candidate(answer.id))
            self._sent_reasoning = self._sent_text = self._sent_calls = 0
            yield from super().finish([answer])

    def last(self, answers: list[Answer]) -> Iterator[bytes]:
        for index, (answer, candidate) in enumerate(zip(answers, self._candidates, strict=True)):
            part = {"text": candidate.held, **candidate.sign()}
            ended = _ended(answer, index, logprobs=self.request.want_logprobs)
            told = _told(answers) if index == len(answers) - 1 else {}
            yield self._written(self._chunk({"content": {"role": "model", "parts": [part]}, **ended}, told))

    def _start(self, prompt_tokens: int) -> Iterator[bytes]:
        yield from ()

    def _reasoning(self, delta: str) -> Iterator[bytes]:
        self._candidates[-1].thoughts += delta
        if self._shows:
            yield self._part({"text": delta, "thought": True})

    def _text(self, delta: str) -> Iterator[bytes]:
        yield from self._let_go()
        self._candidates[-1].held = delta

    def _call(self, index: int, call: ToolCall) -> Iterator[bytes]:
        yield from self._let_go()
        yield self._part({**_called(call), **self._candidates[-1].sign()})

    def _let_go(self) -> Iterator[bytes]:
        candidate = self._candidates[-1]
        if candidate.held:
            yield self._part({"text": candidate.held})
            candidate.held = ""

    def _part(self, part: dict[str, Any]) -> bytes:
        content = {"role": "model", "parts": [part]}
        return self._written(self._chunk({"content": content, "index": len(self._candidates) - 1}))

    def _chunk(self, candidate: dict[str, Any], told: Mapping[str, Any] | None = None) -> bytes:
        named = _named(self.completion_id, self.request.model)
        return orjson.dumps({"candidates": [candidate], **(told or {}), **named})

    def _written(self, chunk: bytes) -> bytes:
        return sse(chunk)


class GenerateArray(GenerateStream):
    """Without `alt=sse`: the same chunks as the elements of an array that is written as they come."""

    content_type = b"application/json; charset=utf-8"
    _begun = False

    def last(self, answers: list[Answer]) -> Iterator[bytes]:
        yield from super().last(answers)
        yield b"]"

    def broken(self, dialect: Dialect, status: int, code: str, message: str) -> bytes:
        return self._written(orjson.dumps(dialect.error(status, code, message))) + b"]"

    def _written(self, chunk: bytes) -> bytes:
        before, self._begun = (b",\r\n" if self._begun else b"["), True
        return before + chunk


def _parts(answer: Answer, *, thoughts: bool) -> list[dict[str, Any]]:
    message = answer.message
    parts: list[dict[str, Any]] = []
    if message.reasoning and thoughts:
        parts.append({"text": message.reasoning, "thought": True})
    if message.content or not message.tool_calls:
        parts.append({"text": message.content})
    signed = len(parts) if message.tool_calls else -1
    parts += [_called(call) for call in message.tool_calls]
    parts[signed]["thoughtSignature"] = seals.seal(answer.id, message.reasoning or "")
    return parts


def _called(call: ToolCall) -> dict[str, Any]:
    return {"functionCall": {"id": call.id, "name": call.name, "args": _arguments(call)}}


def _arguments(call: ToolCall) -> dict[str, Any]:
    """An object, since this wire has nothing else; what is none is passed on under a name that no tool takes, so that
    the harness refuses it as it would refuse any wrong arguments."""
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _ended(answer: Answer, index: int, *, logprobs: bool) -> dict[str, Any]:
    ended: dict[str, Any] = {"finishReason": FINISHED[answer.finish_reason], "index": index}
    if logprobs and answer.logprobs:
        pairs = zip(answer.token_texts, answer.logprobs, strict=True)
        ended["avgLogprobs"] = sum(answer.logprobs) / len(answer.logprobs)
        ended["logprobsResult"] = {
            "chosenCandidates": [{"token": text, "logProbability": value} for text, value in pairs]
        }
    return ended


def _told(answers: list[Answer]) -> dict[str, Any]:
    prompt, sampled = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    thought, cached = sum(answer.reasoning_tokens for answer in answers), answers[0].cached_tokens
    usage: dict[str, Any] = {"promptTokenCount": prompt, "candidatesTokenCount": sampled - thought}
    if cached:
        usage["cachedContentTokenCount"] = cached
    if thought:
        usage["thoughtsTokenCount"] = thought
    usage["totalTokenCount"] = prompt + sampled
    usage["promptTokensDetails"] = [{"modality": "TEXT", "tokenCount": prompt}]
    return {"usageMetadata": usage}


def _named(completion_id: str, model: str) -> dict[str, str]:
    return {"modelVersion": model, "responseId": completion_id.rpartition("-")[2]}
