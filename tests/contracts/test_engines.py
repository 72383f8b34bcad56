"""What every engine adapter promises, against the tiny engine, which speaks the servers' own HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np
import pytest

from polar.engines import ENGINES
from polar.engines.base import Engine, Generation
from polar.errors import EngineError
from polar.messages import Sampling
from polar.registry import load
from polar.renderers import for_folder

MODEL = Path(__file__).parents[2] / "polar" / "tiny_engine" / "model"
PROMPT = for_folder(MODEL).render((), ())
T = TypeVar("T")


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The tiny engine on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-m", "polar.tiny_engine", *arguments, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{url}/model_info", timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and child.poll() is None
                time.sleep(0.05)
        yield url
    finally:
        child.terminate()
        child.wait(10)


@pytest.fixture(scope="module")
def model_url() -> Iterator[str]:
    """The model."""
    with served("--model", str(MODEL)) as url:
        yield url


@pytest.fixture(scope="module")
def script_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scripted twin, slow enough to be interrupted."""
    path = tmp_path_factory.mktemp("script") / "script.json"
    answer = {"content": "one two three " * 40}
    path.write_text(json.dumps({"scripts": [{"answers": [answer], "tokens_per_second": 50}]}))
    with served("--script", str(path)) as url:
        yield url


@pytest.fixture(params=sorted(ENGINES))
def member(request: pytest.FixtureRequest) -> type[Engine]:
    """Each adapter."""
    return load("engine", ENGINES, request.param, Engine)  # type: ignore[type-abstract]


def using(member: type[Engine], url: str, work: Callable[[Engine], Awaitable[T]]) -> T:
    """Do `work` with an adapter on a loop of its own."""

    async def main() -> T:
        async with aiohttp.ClientSession() as http:
            return await work(member(url, http))

    return asyncio.run(main())


async def streamed(engine: Engine, sampling: Sampling) -> tuple[list[list[int]], Generation]:
    """The pieces of a stream, and its end."""
    pieces: list[list[int]] = []
    async for item in engine.stream(PROMPT, sampling, request_id="stream"):
        if isinstance(item, Generation):
            return pieces, item
        pieces.append(item)
    raise AssertionError("the stream had no end")


def test_passport(member: type[Engine], model_url: str) -> None:
    """An engine says what it serves, how much it can read, and where its tokenizer is."""
    passport = using(member, model_url, lambda engine: engine.passport())
    assert passport.model
    assert passport.context_length == 4096
    assert Path(passport.tokenizer or "") == MODEL
    assert not passport.scripted


def test_generate(member: type[Engine], model_url: str) -> None:
    """Each id has its finite log-probability, the versions span the output, and arrays are prompts too."""
    sampling = Sampling(temperature=1.0, max_tokens=20, seed=3)
    one, two = using(
        member,
        model_url,
        lambda engine: asyncio.gather(
            engine.generate(PROMPT, sampling, request_id="a"),
            engine.generate(np.asarray(PROMPT, dtype="<i4"), sampling, request_id="b"),
        ),
    )
    assert one.output_ids == two.output_ids
    assert len(one.logprobs or []) == len(one.output_ids) > 0
    assert all(math.isfinite(value) and value <= 0 for value in one.logprobs or [])
    assert (one.policy_versions[0]["start"], one.policy_versions[-1]["end"]) == (0, len(one.output_ids))
    assert one.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "reason", "matched"),
    [(Sampling(max_tokens=2), "length", None), (Sampling(max_tokens=99, stop=("three",)), "stop", "three")],
)
def test_finish_reasons(
    member: type[Engine], script_url: str, sampling: Sampling, reason: str, matched: str | None
) -> None:
    """Why sampling ended comes through in our words."""
    found = using(member, script_url, lambda engine: engine.generate(PROMPT, sampling, request_id="a"))
    assert (found.finish_reason, found.matched_stop) == (reason, matched)


def test_stream_is_generate(member: type[Engine], script_url: str) -> None:
    """A stream's pieces are the output, each id once."""
    pieces, whole = using(member, script_url, lambda engine: streamed(engine, Sampling(max_tokens=12)))
    again = using(member, script_url, lambda e: e.generate(PROMPT, Sampling(max_tokens=12), request_id="a"))
    assert sum(pieces, []) == whole.output_ids == again.output_ids
    assert whole.logprobs == again.logprobs
    assert not member.STREAMS_IDS or len(pieces) > 1


def test_abort(member: type[Engine], script_url: str) -> None:
    """An aborted request answers at once with what it has; aborting what is not there does nothing."""

    async def work(engine: Engine) -> Generation:
        await engine.abort("nothing of that name")
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200), request_id="mine"))
        await asyncio.sleep(0.5)
        await engine.abort("mine")
        return await asyncio.wait_for(task, 1.0)

    found = using(member, script_url, work)
    assert found.finish_reason == "abort"
    assert 0 < len(found.output_ids) < 100
    assert len(found.logprobs or []) == len(found.output_ids)


def test_score(member: type[Engine], model_url: str) -> None:
    """Teacher forcing gives back the log-probabilities that sampling reported."""

    async def work(engine: Engine) -> tuple[Generation, list[float | None]]:
        found = await engine.generate(PROMPT, Sampling(temperature=1.0, max_tokens=16, seed=1), request_id="a")
        return found, await engine.score(PROMPT + found.output_ids)

    found, scores = using(member, model_url, work)
    assert scores[0] is None
    assert scores[len(PROMPT) :] == pytest.approx(found.logprobs, abs=1e-4)


def test_overflow(member: type[Engine], model_url: str) -> None:
    """A prompt that does not fit is an error of its own, and not worth a second try."""
    with pytest.raises(EngineError) as caught:
        using(member, model_url, lambda e: e.generate([5] * 5000, Sampling(max_tokens=1), request_id="a"))
    assert (caught.value.code, caught.value.status, caught.value.retryable) == ("context_length_exceeded", 400, False)


@pytest.mark.parametrize("call", ["passport", "generate", "stream"])
def test_away(member: type[Engine], call: str) -> None:
    """An engine that is not there may be asked again."""

    async def work(engine: Engine) -> None:
        if call == "passport":
            await engine.passport()
        elif call == "generate":
            await engine.generate(PROMPT, Sampling(), request_id="a")
        else:
            await streamed(engine, Sampling())

    with pytest.raises(EngineError) as caught:
        using(member, "http://127.0.0.1:9", work)
    assert (caught.value.code, caught.value.retryable) == ("engine_down", True)
