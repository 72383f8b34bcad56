"""llama-server's adapter: what it sends, and what it makes of answers with gaps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polar.engines.base import Generation
from polar.engines.llama_cpp import LlamaCppEngine
from polar.errors import EngineError
from polar.messages import Sampling
from tests.unit.engines.stub import answering, ask

GOOD: dict[str, Any] = {
    "content": "hi",
    "tokens": [7, 8],
    "completion_probabilities": [{"id": 7, "prob": 0.5}, {"id": 8, "prob": 1.0}],
    "stop_type": "eos",
    "tokens_predicted": 2,
    "tokens_evaluated": 3,
}


def sample(value: dict[str, Any], seen: list[Any] | None = None, **asked: Any) -> Generation:
    """One answer of a server that always says this."""
    routes = {"/completion": answering(value, seen=seen)}
    return ask(LlamaCppEngine, routes, lambda engine: engine.generate([1, 2, 3], Sampling(**asked), request_id="r"))


def test_good() -> None:
    """Probabilities after the sampling chain become log-probabilities."""
    found = sample(GOOD)
    assert (found.output_ids, found.finish_reason, found.prompt_tokens) == ([7, 8], "stop", 3)
    assert found.logprobs == [math.log(0.5), 0.0]


def test_its_own_defaults_do_not_count() -> None:
    """llama-server cuts and penalises by default; what nobody set is sent neutral."""
    seen: list[Any] = []
    sample(GOOD, seen, max_tokens=5, top_k=-1, stop=("x",))
    sent = {name: seen[0][name] for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "n_predict")}
    assert sent == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "n_predict": 5}
    assert (seen[0]["prompt"], seen[0]["return_tokens"], seen[0]["stop"]) == ([1, 2, 3], True, ["x"])


def test_a_gap_leaves_no_logprobs() -> None:
    """Tokens in the middle of a character have no probability there, so none is claimed for any."""
    assert sample({**GOOD, "completion_probabilities": [{"id": 8, "prob": 1.0}]}).logprobs is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": []}, "no_token_ids"),
        ({"tokens": ["hi"]}, "engine_contract"),
        ({"stop_type": "tired"}, "engine_contract"),
        ({"truncated": True}, "engine_altered_prompt"),
    ],
)
def test_broken_contract(change: dict[str, Any], code: str) -> None:
    """An answer without usable tokens is an error with a name."""
    with pytest.raises(EngineError) as caught:
        sample({**GOOD, **change})
    assert caught.value.code == code
