"""An engine adapter speaks one inference server's stock HTTP API: token ids in, ids and log-probabilities out.

No patch, no engine-side chat template. Adapters do the wire; when to retry, what to record and how to
answer the harness belong to the proxy. All calls are asynchronous on one shared aiohttp session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import aiohttp
import numpy as np
import numpy.typing as npt

from polar.errors import EngineError
from polar.messages import FinishReason, Message, ModelRequest, Sampling
from polar.topology import shown_url

LogprobKind = Literal["processed", "tempered", "raw", "unknown", "none"]
"""Of which distribution an engine's log-probabilities are. `processed`: the one that the token was drawn from.
`tempered`: before top-p, top-k and min-p cut it. `raw`: the model's own, at temperature 1. `unknown`: they are given,
and the engine cannot be asked in a way that tells. `none`: there are none, or what is given is not one."""
PromptIds = list[int] | npt.NDArray[np.int32]
"""The ledger keeps prompts as arrays, and a long one is sent without becoming a list first."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished sample."""

    output_ids: list[int]
    """Stop token included where the engine includes it."""
    logprobs: list[float] | None
    """One per output id, natural log; None if the engine gave none."""
    finish_reason: FinishReason
    matched_stop: int | str | None = None
    policy_versions: list[dict[str, Any]] = field(default_factory=list)
    """Spans over the output: {"version", "start", "end"}; empty if the engine does not say."""
    prompt_ids: PromptIds | None = None
    """What the engine says it was given, the very object that was sent if they are equal; None if it does not say."""
    prompt_tokens: int | None = None
    """How many ids the engine says it was given; None if it does not say."""
    detail: str | None = None
    """What the engine says of an abort."""
    timings: dict[str, Any] = field(default_factory=dict)
    message: Message | None = None
    """Of a chat endpoint: the answer as the engine parsed it."""
    output_tokens: int | None = None
    """How many tokens were sampled, where the engine counts them and does not give them."""

    @property
    def sampled(self) -> int:
        """How many tokens were sampled."""
        return len(self.output_ids) or self.output_tokens or 0


@dataclass(frozen=True, slots=True)
class Passport:
    """What an engine can do, as found out by asking it; stored on the lane and shown.

    `passport` says what the server tells of itself; the fields from `ids_in` on are only certain after a probe."""

    engine: str
    model: str
    tokenizer: str | None
    """Folder or name that the engine says its tokenizer comes from."""
    context_length: int | None
    version: str | None = None
    weight_version: str | None = None
    constrains: bool = False
    """Can hold an answer to a JSON schema."""
    scripted: bool = False
    """Answers are replayed, not sampled; shown wherever its tokens are."""
    images: bool = False
    """Says of itself that its model reads pictures."""
    ids_in: bool = True
    """Takes the prompt as token ids."""
    ids_out: bool = True
    """Gives the ids that it sampled."""
    logprobs: LogprobKind = "unknown"
    weight_versions: bool = False
    """Says which weights sampled which token."""
    prompt_ids_back: bool = False
    """Repeats the prompt ids that it was given, so that they can be compared."""
    streams_ids: bool = False


class Engine(ABC):
    """One server at one URL."""

    name: ClassVar[str]
    TAKES_IDS: ClassVar[bool] = True
    """Has a token endpoint: the prompt it sees is the prompt we send."""
    STREAMS_IDS: ClassVar[bool] = False
    """`stream` yields as tokens are sampled; otherwise one piece at the end."""
    CHATS: ClassVar[bool] = False
    """Has a chat endpoint that `chat` speaks, for canonical mode."""
    KEEPS_PARTIALS: ClassVar[bool] = True
    """An aborted `generate` gives what was sampled until then; otherwise it is lost."""

    TAKES_WEIGHTS: ClassVar[bool] = False
    """Can be told over HTTP to take a checkpoint's weights."""
    PROCESSED_BY: ClassVar[str] = "take an engine whose log-probabilities are of the distribution it draws from"
    """What to do so that its log-probabilities are `processed`; ends up in the middle of a sentence."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.shown = shown_url(self.url)
        """Its address, as errors tell it."""
        self.http = http
        self.model = model

    @abstractmethod
    async def passport(self) -> Passport:
        """Ask the server what it is. Raises EngineError."""

    @abstractmethod
    async def generate(self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str) -> Generation:
        """Sample once. Raises EngineError; `retryable` only if the engine provably did not begin."""

    @abstractmethod
    def stream(
        self, prompt_ids: PromptIds, sampling: Sampling, *, request_id: str
    ) -> AsyncIterator[list[int] | Generation]:
        """New output ids as they come, then the whole Generation as the last item."""

    async def chat(self, request: ModelRequest, sampling: Sampling, *, request_id: str) -> Generation:
        """Answer messages, rendered and parsed by the engine itself; ids and log-probabilities where it gives them.

        Raises EngineError."""
        raise EngineError(
            f"the {self.name} engine has no chat endpoint that Polar speaks: set `mode: token` for its lane",
            code="engine_setup",
        )

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Stop a request; returns at once, also if there is none."""

    @abstractmethod
    async def score(self, ids: list[int]) -> list[float | None]:
        """Log-probability of each id after the ones before it (teacher forcing); the first is None."""

    async def update_weights(self, path: str, version: str) -> None:
        """Take the weights of the checkpoint at `path`, as the engine's machine sees it, under this version's name;
        forget what was cached of the old ones. Returns once they are in use. Raises EngineError."""
        raise EngineError(f"the {self.name} engine takes no weights over HTTP", code="takes_no_weights")
