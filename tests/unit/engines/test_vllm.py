"""vLLM's adapter: what it sends, which way it goes, and servers that break the contract."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from polar.engines.base import Engine, Generation
from polar.engines.vllm import VLLMEngine
from polar.errors import EngineError
from polar.messages import Sampling
from tests.unit.engines.stub import Handler, answering, ask, streaming

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def event(**choice: Any) -> dict[str, Any]:
    """One event of the token route with two tokens and the end."""
    content = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -0.25}]
    whole = {"index": 0, "token_ids": [7, 8], "finish_reason": "stop", "logprobs": {"content": content}, **choice}
    return {"prompt_token_ids": [1, 2, 3], "choices": [whole]}


def sample(routes: dict[str, Handler], sampling: Sampling | None = None) -> Generation:
    """One answer."""
    asked = sampling or Sampling(max_tokens=9)
    return ask(VLLMEngine, routes, lambda engine: engine.generate([1, 2, 3], asked, request_id="r"))


def test_token_route() -> None:
    """The token route is asked first; what nobody set is sent neutral, and what came is read in full."""
    seen: list[Any] = []
    spans = [{"version": "v1", "start": 0, "end": 2}]
    found = sample({GENERATE: streaming(event(weight_versions=spans), USAGE, seen=seen)}, Sampling(seed=4, stop=("x",)))
    assert (found.output_ids, found.logprobs, found.finish_reason) == ([7, 8], [-0.5, -0.25], "stop")
    assert (found.prompt_ids, found.prompt_tokens, found.policy_versions) == ([1, 2, 3], 3, spans)
    params = seen[0].pop("sampling_params")
    assert {name: params[name] for name in ("temperature", "top_p", "top_k", "seed", "stop", "logprobs")} == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 4,
        "stop": ["x"],
        "logprobs": 0,
    }
    assert (seen[0]["token_ids"], seen[0]["request_id"], seen[0]["stream"]) == ([1, 2, 3], "r", True)


@pytest.mark.parametrize("status", [403, 404])
def test_shut_token_route(status: int) -> None:
    """A server without --enable-scale-out is spoken to by /v1/completions, and the token route is not asked again."""
    tried: list[Any] = []
    choice = {"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "length"}
    routes = {
        GENERATE: answering({"error": {"message": "no"}}, status, seen=tried),
        COMPLETIONS: streaming({"choices": [{**choice, "prompt_token_ids": [1, 2, 3]}]}, USAGE),
    }

    async def twice(engine: Engine) -> Generation:
        await engine.generate([1, 2, 3], Sampling(), request_id="a")
        return await engine.generate([1, 2, 3], Sampling(), request_id="b")

    found = ask(VLLMEngine, routes, twice)
    assert (found.output_ids, found.finish_reason, found.prompt_ids) == ([7, 8], "length", [1, 2, 3])
    assert len(tried) == 1


def test_schema() -> None:
    """Each way has its own field for a schema."""
    seen: list[Any] = []
    schema = Sampling(json_schema='{"enum": [7]}')
    sample({GENERATE: streaming(event(), USAGE, seen=seen)}, schema)
    sample({GENERATE: streaming(event(), USAGE, seen=seen)}, Sampling(json_schema="{}"))
    sample({COMPLETIONS: streaming(event(logprobs={"token_logprobs": [-1, -1]}), USAGE, seen=seen)}, schema)
    assert seen[0]["sampling_params"]["structured_outputs"] == {"json": '{"enum": [7]}'}
    assert seen[1]["sampling_params"]["structured_outputs"] == {"json_object": True}
    assert seen[2]["response_format"]["json_schema"]["schema"] == {"enum": [7]}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([event(token_ids=None), USAGE], "no_token_ids"),
        ([{"choices": [{"text": "hello", "finish_reason": "stop"}]}], "no_token_ids"),
        ([event(token_ids=[7]), USAGE], "engine_contract"),
        ([event(logprobs=None), USAGE], "engine_contract"),
        ([event(finish_reason="tired"), USAGE], "engine_contract"),
        ([event(finish_reason=None), USAGE], "engine_cut"),
        ([], "engine_cut"),
        ([{"error": {"message": "maximum context length is 5", "code": 400}}], "context_length_exceeded"),
    ],
)
def test_broken_contract(events: list[Any], code: str) -> None:
    """An answer without usable tokens is an error with a name, never a completion."""
    with pytest.raises(EngineError) as caught:
        sample({GENERATE: streaming(*events)})
    assert (caught.value.code, caught.value.retryable) == (code, False)


def test_no_ids_says_what_to_do() -> None:
    """The message names the cause and the fix."""
    with pytest.raises(EngineError, match="router in front of it strips them.*set the lane's base_url"):
        sample({GENERATE: streaming(event(token_ids=None), USAGE)})


@pytest.mark.parametrize("before_the_headers", [True, False])
def test_abort_closes_the_connection(before_the_headers: bool) -> None:
    """Whatever the server is doing, an abort ends the call at once, with what came until then."""
    left = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        try:
            if not before_the_headers:
                await reply.prepare(request)
                first = event(finish_reason=None)
                await reply.write(b"data: " + web.json_response(first).body + b"\n\n")  # type: ignore[operator]
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.02)
        finally:
            left.set()
        return reply

    async def work(engine: Engine) -> Generation:
        task = asyncio.create_task(engine.generate([1], Sampling(), request_id="r"))
        await asyncio.sleep(0.2)
        await engine.abort("r")
        found = await asyncio.wait_for(task, 1.0)
        await asyncio.wait_for(left.wait(), 2.0)
        return found

    found = ask(VLLMEngine, {GENERATE: hang}, work)
    assert (found.finish_reason, found.output_ids) == ("abort", [] if before_the_headers else [7, 8])


def test_score() -> None:
    """Each prompt id's own log-probability, or an error."""
    rows = [None, {"2": {"logprob": -1.0}, "9": {"logprob": -0.1}}]
    routes = {COMPLETIONS: answering({"choices": [{"prompt_logprobs": rows}]})}
    assert ask(VLLMEngine, routes, lambda engine: engine.score([1, 2])) == [None, -1.0]
    with pytest.raises(EngineError, match="prompt_logprobs"):
        ask(VLLMEngine, routes, lambda engine: engine.score([1, 3]))
