"""The scripted twin: answers from a file, through the same tokenizer and the same HTTP as the numpy engine.

Stateless: which answer comes next follows from the assistant turns already in the prompt. It computes nothing, so
its log-probabilities are zero, and it says `scripted` wherever it describes itself. Reading a conversation is no
business of this module beyond counting turns and finding the substring that picks a script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from polar.tiny_engine.requests import EngineInfo, Event, Finish, Matches, PromptScores, Request, StopRule, Token

CONTEXT_LENGTH = 262_144
MODEL_ID = "polar-scripted"


class ScriptError(ValueError):
    """The script file cannot be used."""


class ToolCall(BaseModel):
    """A tool call as the script writes it."""

    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Answer(BaseModel):
    """One assistant turn."""

    model_config = ConfigDict(extra="forbid")
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    finish_reason: Literal["stop", "tool_calls", "length", "abort"] = "stop"

    def render(self) -> str:
        """The turn in the tiny model's chat layout, closed unless it was cut short."""
        text = self.content or ""
        for call in self.tool_calls:
            body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            text += ("\n" if text else "") + f"<tool_call>\n{body}\n</tool_call>"
        if self.reasoning:
            text = f"<think>\n{self.reasoning}\n</think>\n\n{text}"
        return text + ("<|im_end|>" if self.finish_reason in ("stop", "tool_calls") else "")


class Script(BaseModel):
    """The answers of one conversation, and the substring of a prompt that picks them."""

    model_config = ConfigDict(extra="forbid")
    match: str | None = None
    answers: list[Answer] = Field(min_length=1)
    latency_seconds: float | None = Field(default=None, ge=0)
    tokens_per_second: float | None = Field(default=None, gt=0)


class ScriptFile(BaseModel):
    """A script file: the first script that matches a prompt answers it."""

    model_config = ConfigDict(extra="forbid")
    scripts: list[Script] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> ScriptFile:
        """Read and check a file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ScriptError(f"cannot use the script {path}: {error}") from error


class ScriptedEngine:
    """Replays answers at a chosen pace."""

    def __init__(
        self,
        scripts: ScriptFile,
        tokenizer: Tokenizer,
        name: str | None = None,
        latency_seconds: float = 0.0,
        model_path: str = MODEL_ID,
    ) -> None:
        self.tokenizer = tokenizer
        self.weight_version = "default"
        self.info = EngineInfo(
            name=name or MODEL_ID,
            model_path=model_path,
            context_length=CONTEXT_LENGTH,
            vocab_size=tokenizer.get_vocab_size(),
            scripted=True,
        )
        self._scripts = scripts.scripts
        self._latency = latency_seconds
        self._eos = (cast(int, tokenizer.token_to_id("<|im_end|>")),)
        self._turn = np.asarray(tokenizer.encode("<|im_start|>assistant", add_special_tokens=False).ids)
        self._aborts: dict[Request, asyncio.Event] = {}
        self._running = asyncio.Event()
        self._running.set()

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return len(self._aborts)

    def turns(self, prompt: list[int]) -> int:
        """The assistant turns in a prompt, the one it asks for included."""
        ids = np.asarray(prompt)
        if len(ids) < len(self._turn):
            return 0
        windows = np.lib.stride_tricks.sliding_window_view(ids, len(self._turn))
        return int((windows == self._turn).all(axis=1).sum())

    def pick(self, prompt: list[int]) -> tuple[Script, Answer] | None:
        """The script for a prompt and its next answer; past the end the last answer repeats."""
        text: str | None = None
        for script in self._scripts:
            if script.match is not None and text is None:
                # A long prompt is decoded only when a script asks to look at its text.
                text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            if script.match is None or script.match in (text or ""):
                index = max(0, self.turns(prompt) - 1)
                return script, script.answers[min(index, len(script.answers) - 1)]
        return None

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """The answer, token by token."""
        self._aborts[request] = asyncio.Event()
        try:
            async for event in self._play(request):
                yield event
        finally:
            del self._aborts[request]

    async def _play(self, request: Request) -> AsyncGenerator[Event, None]:
        picked = self.pick(request.prompt)
        if picked is None:
            yield Finish("abort", message="no script matches this prompt")
            return
        script, answer = picked
        latency = self._latency if script.latency_seconds is None else script.latency_seconds
        pace = 1 / script.tokens_per_second if script.tokens_per_second else 0.0
        if await self._aborted(request, latency):
            yield Finish("abort", message="aborted by request")
            return
        if request.score_prompt:
            yield PromptScores([0.0] * (len(request.prompt) - 1))
        rule = StopRule(request.params, self._eos, self.tokenizer)
        ids: list[int] = []
        finish = rule.check(ids)
        for token in self._rest(request.prompt, self.tokenizer.encode(answer.render(), add_special_tokens=False).ids):
            if finish:
                break
            if await self._aborted(request, pace):
                finish = Finish("abort", message="aborted by request")
                break
            ids.append(token)
            yield Token(token, 0.0, self.weight_version)
            finish = rule.check(ids)
        if finish is None:
            # Reached by answers cut short on purpose, and by a request that ignores the end token.
            finish = Finish(
                "stop" if answer.finish_reason == "tool_calls" else answer.finish_reason, message="scripted"
            )
        yield finish

    def _rest(self, prompt: list[int], answer: list[int]) -> list[int]:
        """The answer but for as much of its beginning as the prompt ends with, as a model goes on from where it is."""
        size = len(self._turn)
        begins = (at for at in range(len(prompt) - size, -1, -1) if prompt[at : at + size] == self._turn.tolist())
        most = len(prompt) - next(begins, len(prompt))
        there = (count for count in range(min(most, len(answer)), 0, -1) if prompt[-count:] == answer[:count])
        return answer[next(there, 0) :]

    async def _aborted(self, request: Request, delay: float) -> bool:
        """Wait for the pace and for a pause to end; whether the request was aborted meanwhile."""
        abort = self._aborts[request]
        if delay > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(abort.wait(), delay)
        while not self._running.is_set() and not abort.is_set():
            waits = [asyncio.ensure_future(abort.wait()), asyncio.ensure_future(self._running.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return abort.is_set()

    def refuse(self, request: Request) -> str | None:
        """A prompt that no script matches is refused before anything is sent."""
        return None if self.pick(request.prompt) else "no script matches this prompt"

    def abort(self, matches: Matches) -> None:
        """End every matching request."""
        for request, event in self._aborts.items():
            if matches(request):
                event.set()

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Hold answers back; there is no cache to keep or to forget."""
        self._running.clear()
        if mode == "abort":
            self.abort(lambda _: True)

    def resume(self) -> None:
        """Answer again."""
        self._running.set()

    async def update_weights(self, model_path: str, version: str | None) -> None:
        """Only the version changes: a script has no weights."""
        if version is not None:
            self.weight_version = version

    def close(self) -> None:
        """Nothing is held."""
