"""A real vLLM: the contract of every adapter, and what only a real server can show."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine as Database
from sqlalchemy import update
from sqlalchemy.orm import Session

from polar.builders.base import Trace
from polar.builders.prefix_merging import PrefixMerging
from polar.engines.base import Engine, Generation
from polar.engines.parity import Sample, check
from polar.engines.probe import probe
from polar.engines.sglang import SGLangEngine
from polar.engines.vllm import VLLMEngine
from polar.messages import Sampling
from polar.models import Lane
from polar.spec import parse_task
from polar.stages import fitness
from polar.stages.calls import load_calls
from polar.topology import EngineSpec, LaneSpec
from tests.contracts import test_engines as contract
from tests.contracts.test_engines import (  # noqa: F401 - tests that are run here again, on the real thing
    PROMPT,
    streamed,
    test_generate,
    test_length,
    test_overflow,
    test_passport,
    test_score,
    test_stream_is_generate,
    using,
)
from tests.engines.conftest import Real, checkpoint
from tests.integration.rig import client, completions, open_session, serve, until

FLOAT_NOISE = 1e-4
SEVENS = '{"type": "array", "items": {"enum": [7]}, "minItems": 1500}'
LONG = Sampling(temperature=1.0, max_tokens=3000, seed=11, json_schema=SEVENS)
"""Of a schema that does not let the end token come soon."""
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a key up",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


@pytest.fixture
def member() -> type[Engine]:
    """The adapter under test."""
    return VLLMEngine


@pytest.fixture
def model_url(real: Real) -> str:
    """The real server."""
    return real.url


def test_chat(real: Real) -> None:
    """The chat endpoint's ids say what was seen and sampled, and its parser finds the tool call."""
    contract.test_chat(VLLMEngine, real.url)


def samples(engine: Engine, count: int = 6) -> Any:
    """Several answers to prompts of different lengths."""

    async def work() -> list[Sample]:
        prompts = [PROMPT * (1 + number) for number in range(count)]
        sampling = Sampling(temperature=1.0, max_tokens=24)
        found = await asyncio.gather(*(engine.generate(p, sampling, request_id=f"s{n}") for n, p in enumerate(prompts)))
        return [Sample(p, g.output_ids, list(g.logprobs or [])) for p, g in zip(prompts, found, strict=True)]

    return work()


def test_probe(real: Real) -> None:
    """The probe tells the flags apart: log-probabilities are raw and versions untold unless vLLM is told otherwise."""
    found = using(VLLMEngine, real.url, probe)
    assert (found.ids_in, found.ids_out, found.prompt_ids_back, found.constrains) == (True, True, True, True)
    assert found.logprobs == ("processed" if real.opened else "raw")
    assert found.weight_versions is real.opened
    assert (found.version or "").startswith("0.")


def test_what_a_lane_refuses(real: Real) -> None:
    """A task with a temperature of its own is refused where log-probabilities are raw, and told the flag."""
    lane = LaneSpec(name="gpu0", engine=EngineSpec(engine="vllm", base_url=real.url))
    passport = asyncio.run(fitness.probed(lane.engine))
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    task = {"task_id": "t", "instruction": "", "agent": agent, "sampling": {"temperature": 0.7, "top_p": 0.9}}
    assert fitness.unfit(passport, lane, parse_task({**task, "sampling": {}})) is None
    reason = fitness.unfit(passport, lane, parse_task(task))
    assert (reason is None) is real.opened
    assert real.opened or "--logprobs-mode processed_logprobs" in str(reason)


def test_the_numpy_engine_agrees(real: Real, tiny_url: str) -> None:
    """vLLM's log-probabilities of what it sampled are those of the reference engine."""
    found = using(VLLMEngine, real.url, samples)
    parity = using(SGLangEngine, tiny_url, lambda engine: check(engine, found, tokens=200, alarm=FLOAT_NOISE))
    print(f"\nvLLM against numpy: {parity.tokens} tokens, mean {parity.mean:.1e}, worst {parity.worst:.1e}")  # noqa: T201
    assert parity.tokens > 60
    assert parity.worst <= FLOAT_NOISE


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_abort(real: Real, way: str) -> None:
    """An abort hands over what was sampled, at once, and the server works no more for it."""

    async def running(engine: Engine) -> float:
        async with engine.http.get(f"{real.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    async def work(engine: Engine) -> Generation:
        await engine.passport()
        if way == "stream":

            async def whole() -> Generation:
                async for item in engine.stream(PROMPT, LONG, request_id="x"):
                    if isinstance(item, Generation):
                        return item
                raise AssertionError("no end")

            task = asyncio.create_task(whole())
        else:
            task = asyncio.create_task(engine.generate(PROMPT, LONG, request_id="x"))
        await asyncio.sleep(2.0)
        assert await running(engine) == 1.0
        await engine.abort("x")
        found = await asyncio.wait_for(task, 1.0)
        for _ in range(50):
            if not await running(engine):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError("the server goes on with an aborted request")

    found = using(VLLMEngine, real.url, work)
    assert found.finish_reason == "abort"
    assert 0 < len(found.output_ids) < 3000
    assert len(found.logprobs or []) == len(found.output_ids)


def test_stop_string(real: Real) -> None:
    """A stop string ends the answer, its tokens stay in the output, and it is named."""
    without = replace(LONG, max_tokens=20)
    first = using(VLLMEngine, real.url, lambda e: e.generate(PROMPT, without, request_id="a"))
    assert (first.finish_reason, len(first.output_ids)) == ("length", 20)
    stopped = replace(without, stop=("7",))
    found = using(VLLMEngine, real.url, lambda e: e.generate(PROMPT, stopped, request_id="a"))
    assert (found.finish_reason, found.matched_stop) == ("stop", "7")
    assert found.output_ids == first.output_ids[: len(found.output_ids)]
    assert len(found.output_ids) < 20


def test_schema(real: Real) -> None:
    """A schema holds by whichever way the ids go."""
    asked = Sampling(max_tokens=8, json_schema='{"enum": [7]}')
    found = using(VLLMEngine, real.url, lambda e: e.generate(PROMPT, asked, request_id="a"))
    with httpx.Client(base_url=real.url) as http:
        text = http.post("/detokenize", json={"model": "tiny", "tokens": found.output_ids}).json()["prompt"]
    assert text.removesuffix("<|im_end|>") == "7"


def test_parity_sees_a_push(real: Real, tmp_path: Path) -> None:
    """Weights that differ by a hundredth raise the alarm; with the old ones back, all is well."""

    def push(folder: Path, version: str) -> None:
        using(VLLMEngine, real.url, lambda e: e.update_weights(str(folder), version))

    before = using(VLLMEngine, real.url, samples)
    assert using(VLLMEngine, real.url, lambda e: check(e, before, alarm=FLOAT_NOISE)).well
    push(checkpoint(tmp_path / "other", shift=0.05), "other")
    try:
        changed = using(VLLMEngine, real.url, lambda e: check(e, before, alarm=FLOAT_NOISE))
        fresh = using(VLLMEngine, real.url, samples)
        consistent = using(VLLMEngine, real.url, lambda e: check(e, fresh, alarm=FLOAT_NOISE))
        told = using(VLLMEngine, real.url, lambda e: e.generate(PROMPT, Sampling(max_tokens=4), request_id="v"))
        passport = using(VLLMEngine, real.url, lambda e: e.passport())
    finally:
        push(real.folder, "default")
    assert not changed.well
    assert changed.mean > 10 * FLOAT_NOISE
    assert consistent.well
    assert passport.weight_version == "other"
    assert {span["version"] for span in told.policy_versions} == ({"other"} if real.opened else set())
    assert using(VLLMEngine, real.url, lambda e: check(e, before, alarm=FLOAT_NOISE)).well


def converse(url: str) -> None:
    """An agent that spells the arguments of its calls in its own way."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the lookup tool."}]
    messages.append({"role": "user", "content": "find a"})
    for turn in range(3):
        reply = client(url).chat.completions.create(model="m", messages=messages, tools=[TOOL], max_tokens=48)  # type: ignore[call-overload]
        echo = reply.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        for call in echo.get("tool_calls", []):
            spelled = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
            call["function"]["arguments"] = spelled
        # A newline more, as agents add: a template prints it, and no engine sampled it.
        messages.append({**echo, "content": (echo.get("content") or "") + "\n"})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "47"} for call in echo.get("tool_calls", [])]
        messages += results or [{"role": "user", "content": f"find {'bcd'[turn]}"}]


def built(database: Database, database_url: str, real: Real, mode: str) -> list[Trace]:
    """The traces of one conversation in a mode."""
    session_id = open_session(database, real.url, sampling={"temperature": 1.0, "seed": 3})
    engine = {"engine": "vllm", "base_url": real.url, "mode": mode}
    with Session(database) as db, db.begin():
        db.execute(update(Lane).values(engine=engine))
    with serve(database_url) as proxy:
        converse(proxy)
        until(lambda: all(row.delivered for row in completions(database)))
    with Session(database) as db:
        return PrefixMerging().build(load_calls(db, session_id, 1)).traces


@pytest.mark.parametrize("mode", ["token", "canonical"])
def test_modes(database: Database, database_url: str, real: Real, mode: str) -> None:
    """Through the proxy: token mode keeps the conversation in one exact trace, canonical mode drifts and says where."""
    traces = built(database, database_url, real, mode)
    flags = {flag for trace in traces for flag in trace.certificate["flags"]}
    print(f"\n{mode}: {len(traces)} traces, flags {sorted(flags)}")  # noqa: T201
    assert all(trace.logprobs is not None for trace in traces)
    if mode == "token":
        assert [trace.fidelity for trace in traces] == ["exact"]
    else:
        assert len(traces) > 1
        assert "parent_mismatch" in flags


def test_streams(real: Real) -> None:
    """Ids come one by one where somebody watches, and in bunches where nobody does."""

    async def pieces(engine: Engine) -> int:
        await engine.passport()
        found, whole = await streamed(engine, replace(LONG, max_tokens=60))
        assert sum(found, []) == whole.output_ids
        return len(found)

    assert using(VLLMEngine, real.url, pieces) > 20
