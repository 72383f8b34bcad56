"""The scripted twin: which answer comes, and how it is rendered."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.tiny_engine.requests import Request
from polar.tiny_engine.sampling import SamplingParams
from polar.tiny_engine.scripted import ScriptedEngine, ScriptError, ScriptFile
from polar.tiny_engine.wire import complete

SCRIPTS = {
    "scripts": [
        {
            "match": "count",
            "answers": [
                {"content": "one", "tool_calls": [{"name": "bash", "arguments": {"command": "ls é"}}]},
                {"content": "two", "reasoning": "hm"},
                {"content": "cut", "finish_reason": "length"},
            ],
        },
        {"match": "slow", "answers": [{"content": "late"}], "latency_seconds": 0.2},
    ]
}
ASK = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "x<|im_end|>\n<|im_start|>user\nassistant<|im_end|>\n<|im_start|>assistant\n"
PARAMS = SamplingParams(max_new_tokens=500)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """An engine over the scripts above."""
    return ScriptedEngine(ScriptFile.model_validate(SCRIPTS), tokenizer)


def ask(engine: ScriptedEngine, text: str, params: SamplingParams = PARAMS) -> tuple[str, str]:
    """The answer with its special tokens, and why it ended."""
    ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
    done = asyncio.run(complete(engine, Request(ids, params)))
    assert {token.logprob for token in done.tokens} <= {0.0}
    assert done.finish is not None
    return engine.tokenizer.decode(done.ids, skip_special_tokens=False), done.finish.kind


def test_answer_index_is_the_number_of_turns_in_the_prompt(engine: ScriptedEngine) -> None:
    """Each assistant turn already in the prompt moves on by one answer, and the last answer repeats."""
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'
    assert ask(engine, ASK) == (f"one\n{call}<|im_end|>", "stop")
    assert ask(engine, ASK + AGAIN) == ("<think>\nhm\n</think>\n\ntwo<|im_end|>", "stop")
    assert ask(engine, ASK + AGAIN * 2) == ("cut", "length")
    assert ask(engine, ASK + AGAIN * 7) == ("cut", "length")


def test_asking_again_gives_the_same_answer(engine: ScriptedEngine) -> None:
    """The engine keeps no state between requests."""
    assert ask(engine, ASK) == ask(engine, ASK)


def test_a_prompt_that_ends_within_the_answer_gets_the_rest(engine: ScriptedEngine) -> None:
    """Cut anywhere and asked to go on, as after a pause, the parts are the answer."""
    prompt = engine.tokenizer.encode(ASK, add_special_tokens=False).ids
    whole = asyncio.run(complete(engine, Request(prompt, PARAMS))).ids
    for length in (1, 4, len(whole) - 1):
        rest = asyncio.run(complete(engine, Request(prompt + whole[:length], PARAMS))).ids
        assert whole[:length] + rest == whole


def test_length_limit_cuts_an_answer(engine: ScriptedEngine) -> None:
    """max_new_tokens holds for scripted answers too."""
    text, kind = ask(engine, ASK, SamplingParams(max_new_tokens=2))
    assert kind == "length"
    assert len(engine.tokenizer.encode(text).ids) == 2


def test_unmatched_prompt_is_refused(engine: ScriptedEngine) -> None:
    """A prompt that no script matches is refused before generation starts."""
    assert engine.refuse(Request([1])) == "no script matches this prompt"


def test_latency_is_waited_and_can_be_aborted(engine: ScriptedEngine) -> None:
    """A script's latency delays its answer, and an abort ends the wait."""
    ids = engine.tokenizer.encode("slow").ids

    async def aborted() -> str:
        task = asyncio.create_task(complete(engine, Request(ids, rid="r")))
        await asyncio.sleep(0.02)
        engine.abort(lambda request: request.called("r"))
        finish = (await task).finish
        assert finish is not None
        return finish.kind

    start = time.monotonic()
    assert ask(engine, "slow")[1] == "stop"
    assert time.monotonic() - start >= 0.2
    start = time.monotonic()
    assert asyncio.run(aborted()) == "abort"
    assert time.monotonic() - start < 0.15


def test_long_prompts_cost_only_counting(engine: ScriptedEngine) -> None:
    """Turns of a 200,000-token prompt are counted in well under a second."""
    ids = engine.tokenizer.encode(ASK, add_special_tokens=False).ids + [70] * 200_000
    start = time.monotonic()
    assert engine.turns(ids) == 1
    assert time.monotonic() - start < 0.5


def test_bad_script_names_the_field(tmp_path: Path) -> None:
    """A misspelt key is an error that says where it is."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"scripts": [{"answers": [{"contents": "x"}]}]}))
    with pytest.raises(ScriptError, match="contents"):
        ScriptFile.load(path)
