"""The numpy engine as a whole: what it samples is what it scores, alone, in a crowd, paused and aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from polar.tiny_engine import MODEL_DIR
from polar.tiny_engine.engine import TinyEngine
from polar.tiny_engine.lookup import Episode
from polar.tiny_engine.requests import Completion, Request
from polar.tiny_engine.sampling import SamplingParams
from polar.tiny_engine.wire import complete

ENDLESS = SamplingParams(max_new_tokens=3000, ignore_eos=True, seed=1)


@pytest.fixture
def engine() -> Iterator[TinyEngine]:
    """An engine over the packaged checkpoint."""
    engine = TinyEngine(MODEL_DIR)
    yield engine
    engine.close()


def prompt(engine: TinyEngine, key: str = "a") -> list[int]:
    """A prompt of the task."""
    return engine.tokenizer.encode(Episode(key, "47").first_prompt(), add_special_tokens=False).ids


async def together(engine: TinyEngine, requests: list[Request]) -> list[Completion]:
    """Completions of requests that run at the same time."""
    return await asyncio.gather(*(complete(engine, request) for request in requests))


async def started(engine: TinyEngine, request: Request) -> tuple[asyncio.Task[None], Completion]:
    """A running request that has sampled something."""
    completion = Completion(request)

    async def run() -> None:
        async for event in engine.generate(request):
            completion.add(event)

    task = asyncio.create_task(run())
    while len(completion.tokens) < 3:
        await asyncio.sleep(0.005)
    return task, completion


def test_teacher_forcing_equals_sampled_logprobs(engine: TinyEngine, model) -> None:
    """At temperature 1, scoring prompt and output again gives the log-probabilities that sampling answered."""
    keys = "abcdefgh"
    requests = [
        Request(prompt(engine, key), SamplingParams(max_new_tokens=40, ignore_eos=i % 2 == 0, seed=i))
        for i, key in enumerate(keys)
    ]
    for done in asyncio.run(together(engine, requests)):
        scores = model.score(done.request.prompt + done.ids)[-len(done.ids) :]
        np.testing.assert_allclose([token.logprob for token in done.tokens], scores, atol=1e-4)


def test_seeded_request_is_the_same_alone_and_in_a_crowd(engine: TinyEngine) -> None:
    """Neighbours that join and leave the batch do not change what a seeded request samples."""
    mine = Request(prompt(engine), SamplingParams(max_new_tokens=30, ignore_eos=True, seed=5))
    crowd = [Request(prompt(engine, "b"), SamplingParams(max_new_tokens=2 + 3 * i, ignore_eos=True)) for i in range(12)]
    alone = asyncio.run(complete(engine, mine)).ids
    assert asyncio.run(together(engine, [*crowd[:6], mine, *crowd[6:]]))[6].ids == alone


def test_stops_at_the_end_token_and_keeps_it(engine: TinyEngine) -> None:
    """A greedy answer is the right call, its end token included in the ids and left out of the text."""
    done = asyncio.run(complete(engine, Request(prompt(engine, "d"), SamplingParams(temperature=0))))
    assert engine.tokenizer.decode(done.ids, skip_special_tokens=False) == Episode("d", "47").call()
    assert done.finish is not None
    assert (done.finish.kind, done.finish.matched) == ("stop", done.ids[-1])
    assert done.text(engine.tokenizer).endswith("</tool_call>")


def test_stop_string_is_kept_in_ids_and_cut_from_text(engine: TinyEngine) -> None:
    """A stop string ends the sequence; its tokens stay, its text goes."""
    params = SamplingParams(temperature=0, stop=("arguments",))
    done = asyncio.run(complete(engine, Request(prompt(engine), params)))
    assert done.text(engine.tokenizer) == '<tool_call>\n{"name": "lookup", "'
    assert "arguments" in engine.tokenizer.decode(done.ids)


def test_abort_answers_with_the_tokens_so_far(engine: TinyEngine) -> None:
    """An aborted request finishes as aborted and keeps what it sampled."""

    async def scenario() -> Completion:
        task, completion = await started(engine, Request(prompt(engine), ENDLESS, rid="x"))
        engine.abort(lambda request: request.called("x"))
        await asyncio.wait_for(task, 5)
        return completion

    completion = asyncio.run(scenario())
    assert completion.finish is not None
    assert completion.finish.kind == "abort"
    assert completion.tokens


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_weights_pushed_in_a_pause_split_the_spans(engine: TinyEngine, mode) -> None:
    """A request paused, updated and resumed goes on, and its spans say which version sampled which tokens."""
    engine.weight_version = "1"

    async def scenario() -> Completion:
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=1)
        task, completion = await started(engine, Request(prompt(engine), params))
        engine.pause(mode)
        await asyncio.sleep(0.05)
        held = len(completion.tokens)
        await asyncio.sleep(0.05)
        assert len(completion.tokens) == held
        await engine.update_weights(str(MODEL_DIR), "2")
        engine.resume()
        await asyncio.wait_for(task, 5)
        return completion

    completion = asyncio.run(scenario())
    first, second = completion.spans()
    assert (first["version"], second["version"]) == ("1", "2")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 60)


def test_closing_the_stream_frees_the_slot(engine: TinyEngine) -> None:
    """A consumer that goes away ends its request."""

    async def scenario() -> None:
        events = engine.generate(Request(prompt(engine), ENDLESS))
        await anext(events)
        await events.aclose()
        for _ in range(100):
            if engine.in_flight == 0:
                return
            await asyncio.sleep(0.01)
        pytest.fail("the sequence is still running")

    asyncio.run(scenario())


def test_tokenizer_roundtrip(engine: TinyEngine) -> None:
    """Every text comes back byte for byte, special tokens and odd scripts included."""
    for text in (
        "plain text 12\n\n  x",
        "<|im_start|>user\nhé 你好 🙂 e\u0301\x00<|im_end|>",
        Episode("a", "01").call(),
    ):
        ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
        assert engine.tokenizer.decode(ids, skip_special_tokens=False) == text
