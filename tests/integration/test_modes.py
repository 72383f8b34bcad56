"""Token mode and canonical mode beside the engine that sampled: what each trace shows is what the engine had seen."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from polar.builders.base import Trace
from polar.builders.prefix_merging import PrefixMerging
from polar.engines.sglang import SGLangEngine
from polar.models import Lane
from polar.scoring import Comparison, compare
from polar.stages.calls import load_calls
from tests.fakes.traces import check_traces
from tests.integration.rig import MODEL, client, completions, free_port, open_session, process, until

pytestmark = pytest.mark.integration
FLOAT_NOISE = 1e-4
TURNS = 6
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a key up",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


@pytest.fixture(scope="module")
def tiny_url() -> Iterator[str]:
    """The tiny engine, which really samples."""
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--model", str(MODEL), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info", {"OPENBLAS_NUM_THREADS": "1"}):
        yield f"http://127.0.0.1:{port}"


def converse(url: str) -> None:
    """An agent that looks keys up, spells the arguments of its calls in its own way, and ends texts with a newline."""
    ask = client(url).chat.completions.create
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the lookup tool."}]
    for turn in range(TURNS):
        if messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": f"find {'abcdefgh'[turn]}"})
        answer = ask(model="m", messages=messages, tools=[TOOL], max_tokens=48).choices[0].message  # type: ignore[call-overload]
        echo = answer.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        echo["content"] = (echo.get("content") or "") + "\n"
        for call in echo.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        messages.append(echo)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{turn}7"} for call in echo.get("tool_calls", [])
        ]


async def compared(url: str, traces: list[Trace]) -> Comparison:
    """All traces, each from its arrays alone."""
    overall = Comparison()
    async with aiohttp.ClientSession() as http:
        for trace in traces:
            assert trace.logprobs is not None
            shown = {
                "prompt_ids": trace.prompt_ids.tolist(),
                "response_ids": trace.response_ids.tolist(),
                "loss_mask": trace.loss_mask.tolist(),
                "response_logprobs": trace.logprobs.tolist(),
                "metadata": {**trace.metadata, "certificate": trace.certificate},
            }
            overall.add(await compare(SGLangEngine(url, http), shown))
    return overall


@pytest.mark.parametrize("mode", ["token", "canonical"])
def test_what_a_trace_shows_is_what_the_engine_saw(database: Engine, proxy: str, tiny_url: str, mode: str) -> None:
    """Teacher-forced log-probabilities are the recorded ones in both; token mode alone keeps a session in one trace."""
    session_id = open_session(database, tiny_url, sampling={"temperature": 1.0, "seed": 7})
    kind = "sglang" if mode == "token" else "vllm"
    with Session(database) as db, db.begin():
        db.execute(update(Lane).values(engine={"engine": kind, "base_url": tiny_url, "mode": mode}))
    converse(proxy)
    until(lambda: all(row.delivered for row in completions(database)))
    with Session(database) as db:
        calls = load_calls(db, session_id, 1)
    built = PrefixMerging().build(calls)
    check_traces(built, calls)
    found = asyncio.run(compared(tiny_url, built.traces))
    flags = sorted({flag for trace in built.traces for flag in trace.certificate["flags"]})
    context = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in built.traces)
    print(f"{mode}: {len(calls)} calls, {len(built.traces)} traces of {context} tokens, flags {flags}, {found}")  # noqa: T201
    assert (found.compared, found.skipped) == (found.trained, {})
    assert found.maximum < FLOAT_NOISE
    if mode == "token":
        assert (len(built.traces), built.traces[0].fidelity, flags) == (1, "exact", [])
    else:
        assert len(built.traces) > 1
        assert flags == ["parent_mismatch"]
