"""What every builder must do, run over each of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest

from polar import builders
from polar.builders.base import Builder, Call
from polar.errors import BuilderError, SpecError
from polar.spec import StrategySpec

CERTIFICATE = {
    "fidelity",
    "flags",
    "completions",
    "sampled_tokens",
    "policy_versions",
    "first_difference",
    "prompt_verified",
}
STATS = {
    "chains_total",
    "chains_reconstructed_full",
    "chains_reconstructed_truncated",
    "completions_total",
    "completions_merged",
    "auxiliary",
    "holes",
    "tokens_trimmed",
    "by_completion",
}


TOKENS = [name for name in sorted(builders.BUILDERS) if builders.create(StrategySpec(strategy=name)).NEEDS_IDS]


@pytest.fixture(params=TOKENS)
def builder(request: pytest.FixtureRequest) -> Builder:
    return builders.create(StrategySpec(strategy=request.param))


def completion(name: str, prompt: list[int], output: list[int], parent: str | None = None) -> Call:
    return Call(
        id=name,
        parent_id=parent,
        parent_reason="exact" if parent else "root",
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        logprobs=np.full(len(output), -0.5, np.float32),
        request={"messages": [{"role": "user", "content": "begin"}], "tools": [{"type": "function"}]},
        answer={"role": "assistant", "content": "done"},
        finish_reason="stop",
        prompt_verified=True,
        model_requested="asked",
        model_used="used",
        metadata={"dialect": "openai_chat"},
    )


def session() -> list[Call]:
    """Two turns, a side call, a failed call, a hole."""
    return [
        completion("a", [1, 2], [3]),
        replace(completion("title", [8], [9]), role="auxiliary"),
        replace(completion("broken", [1, 2, 3, 4], [], "a"), outcome="failed", logprobs=None),
        completion("b", [1, 2, 3, 4], [5, 6], "a"),
        replace(completion("hole", [1, 2, 3, 4, 5, 6, 7], [], "b"), logprobs=None),
    ]


def test_every_completion_is_accounted_for(builder: Builder) -> None:
    """Each completion that was handed in is in a trace, or left out by name."""
    stats = builder.build(session()).stats
    assert set(stats) == STATS
    where = stats["by_completion"]
    assert {"a", "title", "broken", "b", "hole"} == set(where)
    assert (where["title"], where["broken"], where["hole"]) == ("auxiliary", "failed", "hole")
    assert tuple(stats[key] for key in ("completions_total", "completions_merged", "auxiliary", "holes")) == (
        5,
        2,
        1,
        1,
    )


def test_every_sampled_token_carries_the_mask_once(builder: Builder) -> None:
    """Over all traces, the mask covers what was sampled and nothing else."""
    traces = builder.build(session()).traces
    sampled = [int(each) for trace in traces for each in trace.response_ids[trace.loss_mask == 1]]
    assert sampled == [3, 5, 6]


def test_arrays_align(builder: Builder) -> None:
    """Mask and log-probabilities have one entry for each token of the response, in the promised types."""
    for trace in builder.build(session()).traces:
        assert trace.logprobs is not None
        assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.logprobs)
        assert (np.int32, np.int32, np.uint8, np.float32) == (
            trace.prompt_ids.dtype,
            trace.response_ids.dtype,
            trace.loss_mask.dtype,
            trace.logprobs.dtype,
        )


def test_certificate_and_the_rest_are_json(builder: Builder) -> None:
    """What is stored beside the arrays is plain JSON, with every key of the certificate."""
    built = builder.build(session())
    for trace in built.traces:
        assert set(trace.certificate) == CERTIFICATE
        assert orjson.dumps([trace.certificate, trace.metadata, trace.prompt_messages, trace.response_messages])
        assert trace.fidelity == "exact"
        assert trace.tools == [{"type": "function"}]
        assert trace.finish_reason == "stop"
        assert (trace.metadata["model_requested"], trace.metadata["model_used"]) == ("asked", "used")
    assert orjson.dumps(built.stats)


def test_building_leaves_its_input_alone(builder: Builder) -> None:
    """Completions are the same after building as before, and building twice gives the same."""
    calls = session()
    first, second = builder.build(calls), builder.build(calls)
    assert first.stats == second.stats
    assert [trace.certificate for trace in first.traces] == [trace.certificate for trace in second.traces]
    assert calls[3].prompt_ids.tolist() == [1, 2, 3, 4]


def test_no_completions_give_no_traces(builder: Builder) -> None:
    """A session without completions is for its stage to judge; here it is an empty trajectory."""
    built = builder.build([])
    assert (built.traces, built.stats["completions_total"]) == ([], 0)


def test_nothing_but_holes_is_an_error(builder: Builder) -> None:
    """An engine that gives no token ids is named, and not passed off as a session without traces."""
    with pytest.raises(BuilderError, match="token ids"):
        builder.build([replace(completion("a", [1], []), logprobs=None)])


def test_a_completion_twice_is_an_error(builder: Builder) -> None:
    """Two completions with one id would be counted as one."""
    with pytest.raises(BuilderError, match="twice"):
        builder.build([completion("a", [1], [2]), completion("a", [1], [2])])


@pytest.mark.parametrize("name", sorted(builders.BUILDERS))
@pytest.mark.parametrize("config", [{"typo": 1}, {"include_auxiliary": "yes"}], ids=["unknown", "type"])
def test_wrong_settings_are_refused_by_name(name: str, config: dict[str, object]) -> None:
    """A setting that cannot be is refused when the builder is made, with its path."""
    with pytest.raises(SpecError) as caught:
        builders.create(StrategySpec(strategy=name, config=config))
    assert f"builder.config.{next(iter(config))}" == caught.value.errors[0][0]


def test_an_unknown_builder_is_refused() -> None:
    """The error stands at builder.strategy and lists what there is."""
    with pytest.raises(SpecError, match="per_request, prefix_merging") as caught:
        builders.create(StrategySpec(strategy="nonesuch"))
    assert caught.value.errors[0][0] == "builder.strategy"


class OwnBuilder(Builder):
    """A user's own, with its keywords spelled out."""

    def __init__(self, *, depth: int) -> None:
        self.depth = depth

    def build(self, calls: list[Call]) -> builders.base.Built:
        return builders.base.Built([], {})


def test_a_class_of_ones_own_is_taken() -> None:
    """`module:Class` names a builder, and its own refusal of a keyword becomes an error at builder.config."""
    path = f"{OwnBuilder.__module__}:OwnBuilder"
    own = builders.create(StrategySpec(strategy=path, config={"depth": 3}))
    assert own.depth == 3  # type: ignore[attr-defined]
    with pytest.raises(SpecError) as caught:
        builders.create(StrategySpec(strategy=path, config={"breadth": 3}))
    assert caught.value.errors[0][0] == "builder.config"
