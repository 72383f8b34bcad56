"""The numpy engine behind the Engine protocol: a batcher thread seen from an event loop.

Loads checkpoints and moves events across the thread boundary; batching belongs to `batcher`, HTTP to `server`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from polar.tiny_engine.batcher import Batcher
from polar.tiny_engine.model import CheckpointError, Qwen3
from polar.tiny_engine.requests import EngineInfo, Event, Finish, Matches, Request


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    return Tokenizer.from_file(str(path))


class TinyEngine:
    """Real inference of a small Qwen3 checkpoint."""

    def __init__(self, model_dir: Path, name: str | None = None) -> None:
        self._model = Qwen3.load(model_dir)
        self.tokenizer = load_tokenizer(model_dir)
        config = self._model.config
        self.info = EngineInfo(
            name=name or "polar-tiny",
            model_path=str(model_dir),
            context_length=config.context_length,
            vocab_size=config.vocab_size,
            scripted=False,
        )
        self._batcher = Batcher(self._model, self.tokenizer)

    @property
    def weight_version(self) -> str:
        """The version that the next token will carry."""
        return self._batcher.version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self._batcher.version = version

    @property
    def in_flight(self) -> int:
        """Requests queued or in the batch."""
        return self._batcher.in_flight

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request as the batcher makes them."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            # The loop may have closed under a request nobody reads any more; that must not end the batcher's thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, event)

        self._batcher.submit(request, sink)
        finished = False
        try:
            while not finished:
                event = await queue.get()
                finished = isinstance(event, Finish)
                yield event
        finally:
            if not finished:
                self._batcher.abort(lambda other: other is request, "client went away")

    def refuse(self, request: Request) -> str | None:
        """A model answers every prompt."""
        return None

    def abort(self, matches: Matches) -> None:
        """End every matching request."""
        self._batcher.abort(matches)

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop sampling."""
        self._batcher.pause(mode)

    def resume(self) -> None:
        """Sample again."""
        self._batcher.resume()

    async def update_weights(self, model_path: str, version: str | None) -> None:
        """Load a checkpoint of the same shape beside the running one, then swap."""
        fresh = await asyncio.to_thread(Qwen3.load, Path(model_path))
        if fresh.config != self._model.config:
            raise CheckpointError(f"the checkpoint in {model_path} has another configuration than the one served")
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        self._batcher.swap(fresh, version, lambda: loop.call_soon_threadsafe(done.set))  # type: ignore[arg-type]
        await done.wait()
        self._model = fresh

    def close(self) -> None:
        """End the batcher's thread."""
        self._batcher.close()
