"""Both engines over both HTTP surfaces, as subprocesses, with the fields that real SGLang and vLLM answer."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar.tiny_engine import MODEL_DIR
from polar.tiny_engine.lookup import Episode

PROMPT = Episode("a", "47").first_prompt()
SCRIPT = {"scripts": [{"match": "find a", "answers": [{"content": "hello"}], "tokens_per_second": 1000}]}


def start(*args: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server on a free port, once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "polar.tiny_engine", "--port", str(port), *args])
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        try:
            httpx.get(f"{url}/health").raise_for_status()
            return process, url
        except httpx.TransportError:
            if process.poll() is not None:
                break
            time.sleep(0.05)
    process.kill()
    raise RuntimeError("the engine did not start")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The base address of each engine."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    running = {"tiny": start(), "scripted": start("--script", str(script))}
    yield {kind: url for kind, (_, url) in running.items()}
    for process, _ in running.values():
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture(params=["tiny", "scripted"])
def http(request: pytest.FixtureRequest, servers: dict[str, str]) -> Iterator[httpx.Client]:
    """A client of each engine in turn; its `kind` header says which."""
    with httpx.Client(base_url=servers[request.param], headers={"kind": request.param}, timeout=20) as client:
        yield client


@pytest.fixture
def tiny(servers: dict[str, str]) -> Iterator[httpx.Client]:
    """A client of the numpy engine."""
    with httpx.Client(base_url=servers["tiny"], timeout=20) as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """The JSON answer of a request that must succeed."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(http: httpx.Client, text: str = PROMPT) -> list[int]:
    """A text's ids, as the engine sees them."""
    return post(http, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a server-sent event stream, which must end with [DONE]."""
    with http.stream("POST", path, json=body) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_describes_itself(http: httpx.Client) -> None:
    """Both surfaces name the model, its context and whether it is scripted."""
    scripted = http.headers["kind"] == "scripted"
    info, card = http.get("/model_info").json(), http.get("/v1/models").json()["data"][0]
    assert info["served_model_name"] == card["id"] == ("polar-scripted" if scripted else "polar-tiny")
    assert info["scripted"] is card["scripted"] is scripted
    assert info["context_length"] == card["max_model_len"] == (262144 if scripted else 4096)
    assert http.get("/get_model_info").json() == info
    assert http.get("/health_generate").status_code == http.get("/version").status_code == 200


def test_sglang_generate(http: httpx.Client) -> None:
    """/generate answers ids with their log-probabilities, the end token included."""
    ids = ids_of(http)
    body = {"input_ids": ids, "sampling_params": {"temperature": 0}, "return_logprob": True, "rid": "r1"}
    answer = post(http, "/generate", body)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] <= 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][-1]}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r1", len(ids), len(answer["output_ids"]))
    assert meta["weight_versions"] == [
        {"version": meta["weight_version"], "start": 0, "end": len(answer["output_ids"])}
    ]
    back = post(http, "/detokenize", {"tokens": answer["output_ids"]})
    assert back["text"] == back["prompt"] == answer["text"] + "<|im_end|>"


def test_sglang_stream_is_cumulative(http: httpx.Client) -> None:
    """Streamed /generate repeats everything so far, and ends where the plain answer ends."""
    body = {"text": PROMPT, "sampling_params": {"temperature": 0}, "return_logprob": True}
    whole = post(http, "/generate", body)
    chunks = events(http, "/generate", {**body, "stream": True})
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_sglang_batch_and_n(http: httpx.Client) -> None:
    """A batch, and several samples of it, come back as one flat list."""
    params = {"n": 2, "max_new_tokens": 3}
    answers = post(http, "/generate", {"input_ids": [ids_of(http)] * 2, "sampling_params": params})
    assert [len(answer["output_ids"]) for answer in answers] == [3] * 4


def test_scoring_equals_sampling(tiny: httpx.Client) -> None:
    """Scoring prompt and output without generating gives the log-probabilities that were sampled."""
    ids = ids_of(tiny)
    params = {"temperature": 1.0, "max_new_tokens": 20, "sampling_seed": 3, "ignore_eos": True}
    sampled = post(tiny, "/generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True})
    body = {
        "input_ids": ids + sampled["output_ids"],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    scored = post(tiny, "/generate", body)
    assert scored["output_ids"] == []
    entries = scored["meta_info"]["input_token_logprobs"]
    assert entries[0] == [None, ids[0], None]
    for got, wanted in zip(entries[len(ids) :], sampled["meta_info"]["output_token_logprobs"], strict=True):
        assert got[1] == wanted[1]
        assert got[0] == pytest.approx(wanted[0], abs=1e-4)


def test_vllm_completions(http: httpx.Client) -> None:
    """/v1/completions answers token ids, prompt ids and log-probabilities per choice."""
    ids = ids_of(http)
    body = {"prompt": ids, "max_tokens": 50, "temperature": 0, "return_token_ids": True, "logprobs": 0}
    answer = post(http, "/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    chunks = events(http, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert chunks[-1]["usage"] == answer["usage"]


def test_vllm_token_generate(http: httpx.Client) -> None:
    """/inference/v1/generate answers integer ids with log-probabilities and weight spans, plain and streamed."""
    params = {"max_tokens": 50, "temperature": 0, "logprobs": 0}
    body = {"token_ids": ids_of(http), "sampling_params": params}
    (choice,) = post(http, "/inference/v1/generate", body)["choices"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"][0]["end"] == len(choice["token_ids"])
    chunks = [chunk["choices"][0] for chunk in events(http, "/inference/v1/generate", {**body, "stream": True})]
    assert sum((chunk["token_ids"] for chunk in chunks), []) == choice["token_ids"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {}, "input_ids"),
        ("/generate", {"input_ids": [1, "x"]}, "input_ids.1"),
        ("/generate", {"input_ids": [99999]}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 3}}, "sampling_params.top_p"),
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": "a"}}, "sampling_params"),
        ("/generate", {"input_ids": [1] * 300000}, "input_ids"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 300000}, "max_tokens"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/abort_request", {}, "rid"),
    ],
)
def test_bad_input_names_the_field(http: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    """Bad input is a 400 whose JSON says which field is at fault."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["message"]


def test_unknown_model_is_not_found(http: httpx.Client) -> None:
    """A model id that is not served is a 404, as in vLLM."""
    assert http.post("/v1/completions", json={"prompt": "x", "model": "nope"}).status_code == 404


def test_weight_update_and_version(http: httpx.Client) -> None:
    """A pushed checkpoint and a renamed version show in the next answer; a missing checkpoint is a 400."""
    pushed = {"model_path": str(MODEL_DIR), "weight_version": 7}
    assert post(http, "/update_weights_from_disk", pushed)["success"] is True
    assert http.get("/model_info").json()["weight_version"] == "7"
    post(http, "/update_weight_version", {"new_version": "8"})
    answer = post(http, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "8"
    assert http.get("/flush_cache").status_code == 200
    if http.headers["kind"] == "tiny":
        refused = http.post("/update_weights_from_disk", json={"model_path": str(Path("no/such"))})
        assert (refused.status_code, refused.json()["success"]) == (400, False)


def test_client_that_leaves_ends_its_request(tiny: httpx.Client) -> None:
    """A client that gives up on a long answer, streamed or not, leaves nothing running behind."""
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 3900, "ignore_eos": True}}
    with tiny.stream("POST", "/generate", json={**body, "stream": True}) as stream:
        next(stream.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        tiny.post("/generate", json=body, timeout=0.3)
    for _ in range(100):
        if tiny.get("/get_server_info").json()["running_requests"] == 0:
            return
        time.sleep(0.02)
    pytest.fail("a request outlived its client")


def test_abort_and_pause(tiny: httpx.Client) -> None:
    """A paused engine sends nothing, an aborted request answers with its tokens, a resumed engine goes on."""
    params = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": params, "stream": True, "rid": "long"}
    last = None
    with tiny.stream("POST", "/generate", json=body) as stream:
        for line in stream.iter_lines():
            if last is None and line:
                post(tiny, "/pause_generation", {"mode": "in_place"})
                post(tiny, "/abort_request", {"rid": "long"})
            if line and line != "data: [DONE]":
                last = json.loads(line.removeprefix("data: "))
    post(tiny, "/continue_generation", {})
    assert last is not None
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < 3000
    assert post(tiny, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 2}})["output_ids"]
