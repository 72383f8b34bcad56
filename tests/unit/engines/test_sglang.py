"""SGLang's adapter against servers that break the contract."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
import pytest
from aiohttp import web

from polar.engines.base import Engine, Generation
from polar.engines.sglang import SGLangEngine
from polar.errors import EngineError
from polar.messages import Sampling
from tests.unit.engines import stub

GOOD: dict[str, Any] = {
    "output_ids": [7, 8],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 8},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "prompt_tokens": 3,
        "weight_version": "v1",
    },
}
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(handler: Handler, *, stream: bool = False) -> Generation:
    """One call of a server whose /generate is `handler`."""
    if stream:
        end = streamed(handler)[-1]
        assert isinstance(end, Generation)
        return end
    return serving(handler, lambda engine: engine.generate([1, 2, 3], Sampling(seed=4, stop=("x",)), request_id="r"))


def streamed(handler: Handler) -> list[list[int] | Generation]:
    """All that a stream of that server gives."""

    async def read(engine: Engine) -> list[list[int] | Generation]:
        return [item async for item in engine.stream([1, 2, 3], Sampling(), request_id="r")]

    return serving(handler, read)


def serving(handler: Handler, work: Callable[[Engine], Awaitable[T]]) -> T:
    """What `work` does with that server."""
    return stub.ask(SGLangEngine, {"/generate": handler}, work)


def answering(value: Any, status: int = 200) -> Handler:
    """A handler with one answer, JSON unless it is bytes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=value if isinstance(value, bytes) else orjson.dumps(value), status=status)

    return handle


def without(*path: str) -> dict[str, Any]:
    """The good answer without one field."""
    value = copy.deepcopy(GOOD)
    place = value
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return value


def having(name: str, field: Any) -> dict[str, Any]:
    """The good answer with one field of meta_info changed."""
    value = copy.deepcopy(GOOD)
    value["meta_info"][name] = field
    return value


def test_good() -> None:
    """A stock answer is read in full; one weight version spans it all."""
    found = ask(answering(GOOD))
    assert (found.output_ids, found.logprobs, found.finish_reason) == ([7, 8], [-0.5, -0.25], "stop")
    assert found.policy_versions == [{"version": "v1", "start": 0, "end": 2}]


def test_what_is_sent() -> None:
    """Our words become SGLang's."""
    seen: dict[str, Any] = {}

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        return web.json_response(GOOD)

    ask(handle)
    assert seen == {
        "input_ids": [1, 2, 3],
        "sampling_params": {"sampling_seed": 4, "stop": ["x"]},
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "rid": "r",
    }


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (b"not json", "not JSON"),
        ([], "not a JSON object"),
        ({}, "meta_info"),
        (without("meta_info", "finish_reason"), "finish_reason"),
        (without("meta_info", "output_token_logprobs"), "output_token_logprobs"),
        ({**GOOD, "output_ids": [7]}, "output_token_logprobs"),
        ({**GOOD, "output_ids": [7, 9]}, "output_token_logprobs"),
        ({**GOOD, "output_ids": ["7", "8"]}, "output_ids"),
        (having("output_token_logprobs", [[None, 7], [-1, 8]]), "finite"),
        (having("output_token_logprobs", [7, 8]), "output_token_logprobs"),
        (having("finish_reason", {"type": "tired"}), "finish_reason"),
        (having("finish_reason", None), "finish_reason"),
    ],
)
def test_broken_contract(answer: Any, field: str) -> None:
    """An answer without usable tokens is an error that names the field, never a completion."""
    with pytest.raises(EngineError, match=field) as caught:
        ask(answering(answer))
    assert (caught.value.code, caught.value.retryable) == ("engine_contract", False)


@pytest.mark.parametrize(
    ("status", "text", "code", "retryable"),
    [
        (400, {"error": {"message": "exceeds the maximum context length"}}, "context_length_exceeded", False),
        (400, {"error": {"message": "top_p must be positive"}}, "engine_refused", False),
        (422, {"detail": "no"}, "engine_refused", False),
        (500, b"oops", "engine_error", False),
        (503, b"loading", "engine_error", True),
        (429, {"error": "queue is full"}, "engine_refused", True),
    ],
)
def test_statuses(status: int, text: Any, code: str, retryable: bool) -> None:
    """Only a status that says nothing was begun is worth a second try."""
    with pytest.raises(EngineError) as caught:
        ask(answering(text, status))
    assert (caught.value.code, caught.value.retryable, caught.value.status) == (code, retryable, status)


@pytest.mark.parametrize("stream", [False, True])
def test_cut_before_an_answer(stream: bool) -> None:
    """A connection that closes before a status line, as a stale kept-alive one does, is tried again."""

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with pytest.raises(EngineError) as caught:
        ask(handle, stream=stream)
    assert (caught.value.code, caught.value.retryable) == ("engine_cut", True)


@pytest.mark.parametrize("events", [[], [{**GOOD, "meta_info": {**GOOD["meta_info"], "finish_reason": None}}]])
def test_stream_cut_short(events: list[dict[str, Any]]) -> None:
    """A stream that ends before its finish reason is a failure, and is not tried again."""

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for event in events:
            await reply.write(b"data: " + orjson.dumps(event) + b"\n\n")
        return reply

    with pytest.raises(EngineError) as caught:
        ask(handle, stream=True)
    assert (caught.value.code, caught.value.retryable) == ("engine_cut", False)


@pytest.mark.parametrize("written", [orjson.dumps, lambda value: json.dumps(value).encode()])
def test_a_stream_is_read_as_it_grows(written: Callable[[Any], bytes]) -> None:
    """Each id is given once, however the events are written and whatever their text spells; the end is read whole."""
    spelled = '"output_ids":[9,9] is how it is written'

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for length in (1, 2):
            meta = GOOD["meta_info"] if length == 2 else {**GOOD["meta_info"], "finish_reason": None}
            event = {"text": spelled, "output_ids": [7, 8][:length], "meta_info": meta}
            await reply.write(b"data: " + written(event) + b"\n\n")
            await asyncio.sleep(0.05)
        return reply

    *pieces, end = streamed(handle)
    assert pieces == [[7], [8]]
    assert isinstance(end, Generation)
    assert (end.output_ids, end.logprobs) == ([7, 8], [-0.5, -0.25])


def test_error_in_a_stream() -> None:
    """SGLang reports some refusals as an event under status 200."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = b'data: {"error": {"message": "maximum context length is 5", "code": 400}}\n\ndata: [DONE]\n\n'
        return web.Response(body=body)

    with pytest.raises(EngineError) as caught:
        ask(handle, stream=True)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("echo", "same"), [([1, 2, 3], True), ([1, 2, 4], False), ([1, 2, 3, 4], False)])
@pytest.mark.parametrize("spaced", [False, True])
def test_echoed_prompt(echo: list[int], same: bool, spaced: bool) -> None:
    """Ids that come back as they were sent are known by their text; any others are read, however they are written."""

    async def generate(request: web.Request) -> web.Response:
        value = {**GOOD, "text": '"prompt_token_ids":[1,2,3]', "prompt_token_ids": echo}
        text = json.dumps(value) if spaced else orjson.dumps(value).decode()
        return web.Response(text=text, content_type="application/json")

    found = ask(generate).prompt_ids
    assert found is not None
    assert (list(found) == [1, 2, 3]) is same
    assert list(found) == echo
