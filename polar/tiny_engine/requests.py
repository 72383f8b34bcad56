"""What passes between an engine and its HTTP surfaces: requests, events, stop rules, and the Engine protocol.

Holds no computation and no HTTP. Both engines answer the same events, so neither surface knows which one it serves.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

from polar.tiny_engine.sampling import SamplingParams


@dataclass(frozen=True)
class Token:
    """One sampled token, with the weight version that sampled it."""

    id: int
    logprob: float
    version: str


@dataclass(frozen=True)
class PromptScores:
    """Teacher-forced log-probabilities of the prompt's tokens from the second on."""

    logprobs: list[float]


@dataclass(frozen=True)
class Finish:
    """The end of a sequence; `matched` is the token id or the string that stopped it."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""


Event = Token | PromptScores | Finish


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to continue. Compared by identity: a client may use a rid twice."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    score_prompt: bool = False
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)

    def called(self, rid: str) -> bool:
        """Whether an abort of `rid` means this request, be it itself or one of several under that name."""
        return self.rid == rid or self.rid.startswith(f"{rid}-")


Matches = Callable[[Request], bool]


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself."""

    name: str
    model_path: str
    context_length: int
    vocab_size: int
    scripted: bool


class Engine(Protocol):
    """A tokens-in, tokens-out engine. All methods are called on the server's event loop."""

    info: EngineInfo
    tokenizer: Tokenizer
    weight_version: str

    @property
    def in_flight(self) -> int:
        """Requests that have not finished."""

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request, the last of them a Finish. Closing the generator early aborts it."""

    def refuse(self, request: Request) -> str | None:
        """Why this engine cannot answer a request that is otherwise sound, or nothing."""

    def abort(self, matches: Matches) -> None:
        """End every matching request, which answers Finish('abort') with the tokens so far."""

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop sampling: ending what runs, or forgetting its cache, or keeping it. New requests wait."""

    def resume(self) -> None:
        """Sample again."""

    async def update_weights(self, model_path: str, version: str | None) -> None:
        """Take a checkpoint's weights between two steps. Raises CheckpointError and keeps the old ones."""

    def close(self) -> None:
        """Release what the engine holds."""


class StopRule:
    """Decides after each token whether a sequence is over."""

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...], tokenizer: Tokenizer) -> None:
        self._params = params
        self._ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._tokenizer = tokenizer
        # Every token is at least one byte long, so a stop string cannot reach further back than its own length.
        self._reach = max((len(stop.encode()) for stop in params.stop), default=0)

    def check(self, ids: list[int]) -> Finish | None:
        """The end, if the last of these output ids is it."""
        if ids and ids[-1] in self._ids:
            return Finish("stop", ids[-1])
        if self._reach:
            tail = self._tokenizer.decode(ids[-self._reach :], skip_special_tokens=False)
            for stop in self._params.stop:
                if stop in tail:
                    return Finish("stop", stop)
        if len(ids) >= self._params.max_new_tokens:
            return Finish("length")
        return None


@dataclass
class Completion:
    """The events of one request, gathered."""

    request: Request
    tokens: list[Token] = field(default_factory=list)
    scores: list[float] | None = None
    finish: Finish | None = None
    started: float = field(default_factory=time.monotonic)

    def add(self, event: Event) -> None:
        """Take one more event."""
        if isinstance(event, Token):
            self.tokens.append(event)
        elif isinstance(event, PromptScores):
            self.scores = event.logprobs
        else:
            self.finish = event

    @property
    def ids(self) -> list[int]:
        """The sampled ids, the stop token included."""
        return [token.id for token in self.tokens]

    def text(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> str:
        """The sampled text without whatever stopped it."""
        ids = self.ids
        matched = self.finish.matched if self.finish else None
        if isinstance(matched, int):
            ids = ids[:-1]
        text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            text = text[: text.index(matched)]
        return str(text)

    def spans(self) -> list[dict[str, Any]]:
        """Runs of output tokens under one weight version, as half-open ranges."""
        spans: list[dict[str, Any]] = []
        for i, token in enumerate(self.tokens):
            if not spans or spans[-1]["version"] != token.version:
                spans.append({"version": token.version, "start": i, "end": i})
            spans[-1]["end"] = i + 1
        return spans
