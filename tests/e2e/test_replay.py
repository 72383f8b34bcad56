"""Traces against the engine that sampled them: `polar replay` on real sessions of the tiny engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.engines.sglang import SGLangEngine
from polar.scoring import Comparison, compare
from tests.e2e.up import Up, example
from tests.fakes.checkpoints import shifted
from tests.integration.rig import free_port, process

pytestmark = pytest.mark.e2e
FLOAT_NOISE = 1e-4


def replay(up: Up, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The command's exit code and what it found."""
    env = {**os.environ, "POLAR_HOME": str(up.home), "POLAR_URL": f"http://127.0.0.1:{up.port}"}
    argv = [sys.executable, "-m", "polar", "replay", *arguments, "--json"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request", "token_tree"])
def test_every_trained_token_is_what_the_engine_says(up: Up, builder: str) -> None:
    """One forward pass over the trace alone gives the log-probabilities that were recorded turn by turn."""
    status = up.run(example("tool_lookup", num_samples=4, builder={"strategy": builder}))
    code, found = replay(up, status["task_id"], "--tolerance", str(FLOAT_NOISE))
    overall = found["overall"]
    assert (code, overall["skipped"]) == (0, {})
    assert overall["compared_tokens"] == overall["trained_tokens"] > 50
    assert overall["max_difference"] < FLOAT_NOISE
    print(f"{builder}: {overall}")  # noqa: T201 - the figures are the result; pytest -s shows them


def test_the_same_engine_says_the_same_again(up: Up) -> None:
    """Asked from each call's very prompt with its seed, the engine that sampled gives every token back."""
    status = up.run(example("tool_lookup", num_samples=2, sampling={"temperature": 1.0, "seed": 11}))
    code, found = replay(up, status["task_id"], "--regenerate")
    assert (code, found["overall"]["differ"]) == (0, 0)
    assert found["overall"]["compared"] == found["overall"]["calls"] >= 4
    assert {call["asked"] for call in found["calls"]} == {"recorded"}
    assert max(call["mean_difference"] for call in found["calls"]) < FLOAT_NOISE


def test_another_checkpoint_leaves_what_was_recorded(up: Up, tmp_path: Path) -> None:
    """With other weights the first token that differs is shown, with what each of the two gave it."""
    status = up.run(example("tool_lookup", num_samples=4, sampling={"temperature": 1.0, "seed": 11}))
    model, port = shifted(tmp_path / "model", by=-0.6), free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--model", str(model), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info", {"OPENBLAS_NUM_THREADS": "1"}):
        code, found = replay(up, status["task_id"], "--regenerate", "--engine-url", f"http://127.0.0.1:{port}")
    apart = [call for call in found["calls"] if call["same"] is False]
    assert code == 1 and found["overall"]["differ"] == len(apart) > 0
    for call in apart:
        assert call["recorded"] != call["other"] and call["recorded"]["id"] != call["other"]["id"]
        assert call["recorded"]["logprob"] <= 0 and call["recorded_by_other"] <= 0
        assert call["recorded_text"] is not None and len(call["before"]) == min(12, call["position"])
    assert max(call["mean_difference"] for call in found["calls"]) > 10 * FLOAT_NOISE


def test_another_temperature_is_not_compared(up: Up) -> None:
    """Tokens that were sampled otherwise are counted as such, and a replay that compared nothing does not pass."""
    status = up.run(example("tool_lookup", num_samples=1, sampling={"temperature": 0.7}))
    code, found = replay(up, status["task_id"])
    overall = found["overall"]
    assert (code, overall["compared_tokens"]) == (1, 0)
    assert {"other sampling": overall["trained_tokens"]} == overall["skipped"]


def test_a_trace_that_shows_another_prefix_is_found_out(up: Up) -> None:
    """With one token of the context changed, the later tokens' log-probabilities no longer fit."""
    status = up.run(example("tool_lookup", num_samples=1))
    (trace,) = status["results"][0]["trajectory"]["traces"]
    lane = next(
        lane
        for node in up.http.get("/rollout/status").json()["nodes"]["nodes"]
        for lane in node["lanes"]
        if lane["name"] == "gpu0"
    )

    async def scored() -> Comparison:
        async with aiohttp.ClientSession() as http:
            return await compare(SGLangEngine(lane["engine"]["base_url"], http), trace)

    assert asyncio.run(scored()).maximum < FLOAT_NOISE
    trace["prompt_ids"][len(trace["prompt_ids"]) // 2] += 1
    assert asyncio.run(scored()).maximum > 10 * FLOAT_NOISE
