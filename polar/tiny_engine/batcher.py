"""Continuous batching: one background thread in which sequences join and leave the running batch at each step.

Callers on other threads hand in work and get events through a callback. How a token is chosen belongs to `sampling`,
the arithmetic to `model`, and event loops to `engine`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from polar.tiny_engine.model import Floats, KVCache, Qwen3
from polar.tiny_engine.requests import Event, Finish, Matches, PromptScores, Request, StopRule, Token
from polar.tiny_engine.sampling import sample

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]

MAX_RUNNING = 64
ADMIT_PER_STEP = 8
"""Prompts taken in between two decoding steps; more would make the running sequences stutter."""


class Sequence:
    """A request on its way; `length` counts its positions in the cache."""

    def __init__(self, request: Request, sink: Sink, model: Qwen3, tokenizer: Tokenizer) -> None:
        self.request = request
        self.sink = sink
        self.generator = np.random.default_rng(request.params.seed)
        self.rule = StopRule(request.params, model.config.eos_token_ids, tokenizer)
        self.ids: list[int] = []
        self.length = 0
        self.scored = not request.score_prompt


class Batcher:
    """Runs a model for many requests at once."""

    def __init__(self, model: Qwen3, tokenizer: Tokenizer, version: str = "default") -> None:
        self.version = version
        self._model = model
        self._tokenizer = tokenizer
        self._cache = KVCache(model.config)
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._waiting: deque[Sequence] = deque()
        # A sequence's place in this list is its slot in the cache.
        self._running: list[Sequence] = []
        self._paused = False
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="tiny-engine", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Requests queued or running; exact between two steps only."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; `sink` is called on the batcher's thread with its events."""
        self._between_steps(lambda: self._waiting.append(Sequence(request, sink, self._model, self._tokenizer)))

    def abort(self, matches: Matches, message: str = "aborted by request") -> None:
        """End every matching request, running or waiting."""
        self._between_steps(lambda: self._abort(matches, message))

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Sample nothing until `resume`."""

        def apply() -> None:
            self._paused = True
            if mode == "abort":
                self._abort(lambda _: True, "paused")
            elif mode == "retract":
                # Whoever resumes with other weights then gets a cache made by those weights.
                self._waiting.extendleft(reversed(self._running))
                self._running.clear()

        self._between_steps(apply)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._between_steps(lambda: setattr(self, "_paused", False))

    def swap(self, model: Qwen3, version: str | None, done: Callable[[], None]) -> None:
        """Take other weights between two steps, and call `done` once they are in use."""

        def apply() -> None:
            self._model = model
            self.version = self.version if version is None else version
            done()

        self._between_steps(apply)

    def close(self) -> None:
        """End the thread; requests still in flight are aborted."""
        self.abort(lambda _: True, "engine closed")
        self._between_steps(lambda: setattr(self, "_closed", True))
        self._thread.join(timeout=5)

    def _between_steps(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _loop(self) -> None:
        while not self._closed:
            with self._wake:
                while not self._commands and (self._paused or not (self._running or self._waiting)):
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            if self._paused or self._closed:
                continue
            try:
                self._step()
            except Exception:
                # The thread serves every client, so one bad step must not end it; those in it are told.
                log.exception("a decoding step failed")
                self._abort(lambda _: True, "internal error in a decoding step")

    def _abort(self, matches: Matches, message: str) -> None:
        for sequence in [s for s in self._waiting if matches(s.request)]:
            self._waiting.remove(sequence)
            sequence.sink(Finish("abort", message=message))
        for slot in reversed(range(len(self._running))):
            if matches(self._running[slot].request):
                self._running[slot].sink(Finish("abort", message=message))
                self._free(slot)

    def _step(self) -> None:
        for _ in range(ADMIT_PER_STEP):
            if not self._waiting or len(self._running) >= MAX_RUNNING:
                break
            self._admit(self._waiting.popleft())
        if not self._running:
            return
        # The last sampled token of each sequence is not yet in the cache; this step puts it there.
        ids = np.asarray([[s.ids[-1]] for s in self._running])
        starts = np.asarray([s.length for s in self._running])
        hidden = self._model.forward(ids, starts, self._cache)
        for sequence in self._running:
            sequence.length += 1
        over = self._emit(self._running, self._model.logits(hidden[:, 0]))
        for slot in reversed(over):
            self._free(slot)

    def _admit(self, sequence: Sequence) -> None:
        slot = len(self._running)
        # Listed before the work, so that a failure in it ends this request too.
        self._running.append(sequence)
        request = sequence.request
        prompt = request.prompt + sequence.ids
        hidden = self._model.prefill(prompt, self._cache, slot, every=not sequence.scored)
        sequence.length = len(prompt)
        if not sequence.scored:
            sequence.scored = True
            sequence.sink(PromptScores(self._model.token_logprobs(hidden, prompt)))
        if request.params.max_new_tokens == 0:
            sequence.sink(Finish("length"))
            self._free(slot)
        elif self._emit([sequence], self._model.logits(hidden[-1:])):
            self._free(slot)

    def _emit(self, sequences: list[Sequence], logits: Floats) -> list[int]:
        """Sample one token for each; gives the places of those that are over."""
        params, generators = [s.request.params for s in sequences], [s.generator for s in sequences]
        over: list[int] = []
        for place, (sequence, token, logprob) in enumerate(
            zip(sequences, *sample(logits, params, generators), strict=True)
        ):
            sequence.ids.append(token)
            sequence.sink(Token(token, logprob, self.version))
            finish = sequence.rule.check(sequence.ids)
            if finish:
                sequence.sink(finish)
                over.append(place)
        return over

    def _free(self, slot: int) -> None:
        """Drop a sequence; the last one moves into its slot, which keeps the batch contiguous."""
        last = self._running.pop()
        if slot < len(self._running):
            self._running[slot] = last
            self._cache.move(len(self._running), slot, last.length)
        if not self._running:
            # One long prompt would otherwise keep its memory for as long as the process lives.
            self._cache = KVCache(self._model.config)
