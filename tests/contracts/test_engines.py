"""What every engine adapter promises, against servers that speak the engines' own HTTP.

The tiny engine speaks SGLang's and vLLM's; llama-server's is a fake over the tiny engine. tests/engines runs the same
against a real vLLM.
"""

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
from polar.engines.probe import probe
from polar.engines.vllm import VLLMEngine
from polar.errors import EngineError
from polar.messages import Message, ModelRequest, Sampling, Tool
from polar.registry import load
from polar.renderers import for_folder
from tests.fakes.checkpoints import shifted

MODEL = Path(__file__).parents[2] / "polar" / "tiny_engine" / "model"
PROMPT = for_folder(MODEL).render((), ())
LOOKUP = Tool(
    "lookup",
    "Look a key up",
    {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)
ASKED = ModelRequest("m", (Message("system", "Use the lookup tool."), Message("user", "find a")), (LOOKUP,))
SERVERS = {"llama_cpp": "tests.fakes.llama_server"}
"""Programs that speak as an engine does; the tiny engine where none is named."""
T = TypeVar("T")


class VLLMWithoutScaleOut(VLLMEngine):
    """vLLM whose token route is shut: everything goes by /v1/completions."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, model: str | None = None) -> None:
        super().__init__(url, http, model=model)
        self._token_route = False


EXTRA = {"vllm_by_completions": VLLMWithoutScaleOut}


def members() -> dict[str, type[Engine]]:
    """Each adapter, and vLLM's twice for its two ways."""
    table = {name: load("engine", ENGINES, name, Engine) for name in sorted(ENGINES)}  # type: ignore[type-abstract]
    return {**table, **EXTRA}


TOKENS = [name for name, member in members().items() if member.TAKES_IDS]
CHATS = [name for name, member in members().items() if member.CHATS]


@contextmanager
def served(program: str, *arguments: str) -> Iterator[str]:
    """An engine on a port of its own."""
    with socket.socket() as probe_:
        probe_.bind(("127.0.0.1", 0))
        port = probe_.getsockname()[1]
    child = subprocess.Popen([sys.executable, "-m", program, *arguments, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and child.poll() is None
                time.sleep(0.05)
        yield url
    finally:
        child.terminate()
        child.wait(10)


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, str]]:
    """The model, by program."""
    with served("polar.tiny_engine", "--model", str(MODEL)) as tiny, served(SERVERS["llama_cpp"]) as llama:
        yield {"polar.tiny_engine": tiny, SERVERS["llama_cpp"]: llama}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The scripted twin, slow enough to be interrupted, by program."""
    path = tmp_path_factory.mktemp("script") / "script.json"
    answer = {"content": "one two three " * 40}
    path.write_text(json.dumps({"scripts": [{"answers": [answer], "tokens_per_second": 50}]}))
    arguments = ("--script", str(path))
    with served("polar.tiny_engine", *arguments) as tiny, served(SERVERS["llama_cpp"], *arguments) as llama:
        yield {"polar.tiny_engine": tiny, SERVERS["llama_cpp"]: llama}


@pytest.fixture(params=TOKENS)
def name(request: pytest.FixtureRequest) -> str:
    """Each adapter that takes ids."""
    return str(request.param)


@pytest.fixture
def member(name: str) -> type[Engine]:
    """Its class."""
    return members()[name]


@pytest.fixture
def model_url(name: str, models: dict[str, str]) -> str:
    """The model behind its kind of server."""
    return models[SERVERS.get(name, "polar.tiny_engine")]


@pytest.fixture
def script_url(name: str, scripts: dict[str, str]) -> str:
    """The script behind its kind of server."""
    return scripts[SERVERS.get(name, "polar.tiny_engine")]


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
    assert (Path(passport.tokenizer or "") / "tokenizer.json").is_file()
    assert not passport.scripted


def test_probe(member: type[Engine], model_url: str) -> None:
    """What an engine can do is found out by trying, and its log-probabilities are of what it drew from."""
    found = using(member, model_url, probe)
    assert (found.ids_in, found.ids_out, found.logprobs) == (True, True, "processed")
    assert found.streams_ids is member.STREAMS_IDS
    if member is not members()["llama_cpp"]:
        assert found.prompt_ids_back


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
    if one.policy_versions:
        assert (one.policy_versions[0]["start"], one.policy_versions[-1]["end"]) == (0, len(one.output_ids))
    assert one.prompt_tokens == len(PROMPT)
    assert one.prompt_ids in (None, PROMPT)


def test_says_which_weights(member: type[Engine], model_url: str) -> None:
    """Where an engine says which weights sampled, its passport says that it does."""
    found = using(member, model_url, probe)
    assert found.weight_versions is (member not in (VLLMWithoutScaleOut, members()["llama_cpp"]))


@pytest.mark.parametrize("name", [name for name, member in members().items() if member.TAKES_WEIGHTS])
def test_takes_weights(name: str, tmp_path: Path) -> None:
    """A checkpoint is taken under its version's name and samples from then on; what is no checkpoint is refused."""
    member = members()[name]
    other = shifted(tmp_path / "other")
    with served("polar.tiny_engine", "--model", str(MODEL)) as url:
        old = using(member, url, lambda engine: engine.score(PROMPT))
        with pytest.raises(EngineError, match="no such|no model|not"):
            using(member, url, lambda engine: engine.update_weights(str(tmp_path / "none"), "6"))
        assert using(member, url, lambda engine: engine.score(PROMPT)) == old
        using(member, url, lambda engine: engine.update_weights(str(other), "7"))
        assert using(member, url, lambda engine: engine.score(PROMPT)) != old
        made = using(member, url, lambda e: e.generate(PROMPT, Sampling(max_tokens=2), request_id="a"))
        if made.policy_versions:
            assert {span["version"] for span in made.policy_versions} == {"7"}


def test_length(member: type[Engine], model_url: str) -> None:
    """An answer that the limit cut says so."""
    found = using(member, model_url, lambda engine: engine.generate(PROMPT, Sampling(max_tokens=2), request_id="a"))
    assert (found.finish_reason, len(found.output_ids)) == ("length", 2)


def test_stop_string(member: type[Engine], script_url: str) -> None:
    """An answer that a stop string ended names it."""
    sampling = Sampling(max_tokens=99, stop=("three",))
    found = using(member, script_url, lambda engine: engine.generate(PROMPT, sampling, request_id="a"))
    assert (found.finish_reason, found.matched_stop) == ("stop", "three")


def test_stream_is_generate(member: type[Engine], model_url: str) -> None:
    """A stream's pieces are the output, each id once."""
    sampling = Sampling(max_tokens=12, temperature=0.0)
    pieces, whole = using(member, model_url, lambda engine: streamed(engine, sampling))
    again = using(member, model_url, lambda e: e.generate(PROMPT, sampling, request_id="a"))
    assert sum(pieces, []) == whole.output_ids == again.output_ids
    assert whole.logprobs == pytest.approx(again.logprobs, abs=1e-4)
    assert not member.STREAMS_IDS or len(pieces) > 1


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_abort(member: type[Engine], script_url: str, way: str) -> None:
    """An aborted request answers at once with what it has; aborting what is not there does nothing."""

    async def work(engine: Engine) -> Generation:
        await engine.abort("nothing of that name")
        sampling = Sampling(max_tokens=200)
        if way == "stream":
            task = asyncio.create_task(streamed(engine, sampling))
        else:
            task = asyncio.create_task(engine.generate(PROMPT, sampling, request_id="stream"))
        await asyncio.sleep(0.5)
        await engine.abort("stream")
        found = await asyncio.wait_for(task, 1.0)
        return found[1] if isinstance(found, tuple) else found

    found = using(member, script_url, work)
    assert found.finish_reason == "abort"
    assert len(found.output_ids) < 100
    assert not member.KEEPS_PARTIALS or found.output_ids
    assert len(found.logprobs or []) == len(found.output_ids)


def test_abort_ends_the_work(member: type[Engine], script_url: str) -> None:
    """After an abort the engine works no more for it."""

    async def work(engine: Engine) -> int:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200), request_id="mine"))
        await asyncio.sleep(0.3)
        await engine.abort("mine")
        await task
        for _ in range(40):
            async with engine.http.get(f"{script_url}/server_info") as reply:
                running = (await reply.json()).get("running_requests", 0) if reply.status == 200 else 0
            if not running:
                break
            await asyncio.sleep(0.05)
        return int(running)

    assert using(member, script_url, work) == 0


def test_score(member: type[Engine], model_url: str) -> None:
    """Teacher forcing gives back the log-probabilities that sampling reported, or says that it cannot be had."""

    async def work(engine: Engine) -> tuple[Generation, list[float | None]]:
        found = await engine.generate(PROMPT, Sampling(temperature=1.0, max_tokens=16, seed=1), request_id="a")
        return found, await engine.score(PROMPT + found.output_ids)

    if member is members()["llama_cpp"]:
        with pytest.raises(EngineError) as caught:
            using(member, model_url, work)
        assert caught.value.code == "no_score"
        return
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


@pytest.mark.parametrize("name", CHATS)
def test_chat(member: type[Engine], model_url: str) -> None:
    """A chat endpoint answers messages with a message, and its ids say what the engine really saw and sampled."""

    async def work(engine: Engine) -> Generation:
        await engine.passport()
        return await engine.chat(ASKED, Sampling(temperature=0.0, max_tokens=60), request_id="a")

    found = using(member, model_url, work)
    assert found.message is not None
    (call,) = found.message.tool_calls
    assert (call.name, call.canonical()[1]) == ("lookup", '{"key":"a"}')
    assert found.finish_reason == "stop"
    assert found.sampled > 5
    assert found.prompt_tokens
    if found.output_ids:
        renderer = for_folder(MODEL)
        assert renderer.parse(found.output_ids, ASKED.tools).message.tool_calls[0].name == "lookup"
        assert found.prompt_ids == renderer.render(ASKED.messages, ASKED.tools)
        assert len(found.logprobs or []) == len(found.output_ids)


def test_who_gives_ids_on_chat(models: dict[str, str]) -> None:
    """vLLM and SGLang give the ids of a chat answer; of the others nobody may expect them."""

    async def work(engine: Engine) -> bool:
        await engine.passport()
        return bool((await engine.chat(ASKED, Sampling(max_tokens=4), request_id="a")).output_ids)

    found = {name: using(members()[name], models[SERVERS.get(name, "polar.tiny_engine")], work) for name in CHATS}
    assert {name for name, gives in found.items() if gives} == {"sglang", "tiny", "vllm", "vllm_by_completions"}


@pytest.mark.parametrize("name", [name for name in members() if name not in TOKENS])
def test_chat_only(member: type[Engine], model_url: str) -> None:
    """An engine without a token endpoint says so where ids are sent to it, and in its passport."""
    assert not using(member, model_url, probe).ids_in
    with pytest.raises(EngineError) as caught:
        using(member, model_url, lambda e: e.generate(PROMPT, Sampling(max_tokens=1), request_id="a"))
    assert caught.value.code == "engine_setup"
