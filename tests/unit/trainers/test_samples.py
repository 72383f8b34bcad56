"""Results made into samples, groups, advantages, batches and files."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from polar.trainers import (
    Groups,
    Sample,
    SampleError,
    advantages,
    fresh,
    from_arrow,
    packed,
    padded,
    read_jsonl,
    samples_of,
    staleness,
    to_arrow,
    token_weights,
    write_jsonl,
)
from tests.fakes.results import result, trace


def group(rewards: list[list[float]]) -> list[Sample]:
    """A group whose sessions have traces with these rewards."""
    found: list[Sample] = []
    for number, each in enumerate(rewards):
        traces = [trace(reward=reward, seed=10 * number + place) for place, reward in enumerate(each)]
        found += samples_of(result(f"ses-{number}", traces=traces))
    return found


def test_a_sample_has_the_traces_own_arrays() -> None:
    """Arrays, spans and names are those of the result; segments part sampled tokens from the harness's."""
    body = result("ses-9", "task-9", [trace(3, ((2, 2), (1, 0)), version=7)], metadata={"group_id": "g"})
    (sample,) = samples_of(body)
    (shown,) = body["trajectory"]["traces"]
    assert sample.prompt_ids.tolist() == shown["prompt_ids"] and sample.prompt_ids.dtype == np.int32
    assert sample.response_ids.tolist() == shown["response_ids"]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert sample.logprobs is not None and np.allclose(sample.logprobs, shown["response_logprobs"])
    assert (sample.session_id, sample.task_id, sample.group_id, sample.trace) == ("ses-9", "task-9", "task-9", 0)
    assert samples_of(body, group_by="group_id")[0].group_id == "g"
    assert sample.segments() == [(True, 0, 2), (False, 2, 4), (True, 4, 5)]
    assert sample.version_per_token().tolist() == [7, 7, -1, -1, 7]
    assert len(sample) == 8 and sample.sampled_tokens == 3 and sample.turns == 2


def test_what_may_not_train_is_left_out_unless_asked_for() -> None:
    """An untrainable trace makes no sample; asked for, it weighs nothing."""
    withheld = trace(trainable=False, response_logprobs=None, reward=None)
    body = result(traces=[trace(), withheld])
    assert [sample.trace for sample in samples_of(body)] == [0]
    assert [sample.weight for sample in samples_of(body, trainable_only=False)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_mask": [1]}, "do not line up"),
        ({"response_logprobs": None}, "finite log-probability"),
        ({"response_logprobs": [float("nan")] * 5}, "finite log-probability"),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_refused(changes: dict[str, object], said: str) -> None:
    """The error names the session and the trace."""
    with pytest.raises(SampleError, match=f"session ses-1, trace 0: .*{said}"):
        samples_of(result(traces=[trace(**changes)]))


def test_summaries_and_trees_are_refused() -> None:
    """A summary has no tokens, and a tree read as a line is not what the policy saw."""
    summary = trace()
    del summary["prompt_ids"]
    with pytest.raises(SampleError, match="read results in full"):
        samples_of(result(traces=[summary]))
    tree = trace()
    tree["metadata"]["certificate"]["flags"] = ["branched"]
    with pytest.raises(SampleError, match="prefix_merging"):
        samples_of(result(traces=[tree]))


def test_a_group_is_handed_out_once_complete() -> None:
    """A failed session counts as ended and not as usable; what comes twice counts once."""
    groups = Groups(3)
    assert groups.add(result("a")) is None
    assert groups.add(result("a")) is None
    assert groups.add(result("b", traces=[], status="ERROR")) is None
    assert [each.group_id for each in groups.waiting] == ["task-1"]
    found = groups.add(result("c", status="TIMEOUT"))
    assert found is not None and found.complete and found.usable == 2
    assert found.accepted_fraction == pytest.approx(1 / 3)
    assert [sample.session_id for sample in found.samples()] == ["a", "c"]
    assert groups.waiting == []


def test_leave_one_out_counts_a_session_once() -> None:
    """Ten traces of one session neither outvote its siblings nor move their baseline."""
    samples = group([[1.0] * 10, [0.0], [0.5]])
    found = advantages(samples)
    assert found[:10].tolist() == pytest.approx([0.75] * 10)
    assert found[10:].tolist() == pytest.approx([-0.75, 0.0])
    assert samples[0].advantage == pytest.approx(0.75)


def test_traces_with_rewards_of_their_own() -> None:
    """A session's reward is the mean over its traces; each trace is compared with the other sessions."""
    found = advantages(group([[1.0, 0.0], [0.25]]))
    assert found.tolist() == pytest.approx([0.75, -0.25, -0.25])


def test_group_norm_is_over_sessions_and_within_groups() -> None:
    """Mean and deviation are of the sessions; another group's rewards do not enter; a lone session gets 0."""
    samples = group([[1.0, 1.0, 1.0], [0.0]])
    other = samples_of(result("x", "task-2", [trace(reward=100.0)]))
    found = advantages(samples + other, "group_norm")
    assert found.tolist() == pytest.approx([1.0, 1.0, 1.0, -1.0, 0.0], abs=1e-4)
    assert advantages(group([[0.3], [0.3]]), "group_norm").tolist() == [0.0, 0.0]
    assert advantages(samples, "group_mean").tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])


def test_a_missing_reward_is_named() -> None:
    """It is no zero."""
    with pytest.raises(SampleError, match="ses-1, trace 0: has no reward"):
        advantages(samples_of(result(traces=[trace(reward=None)])))


def test_token_weights_sum_to_one() -> None:
    """By session, each session has the same share; by token, each trained token; none falls on the harness's."""
    samples = group([[1.0, 1.0], [0.0]])
    for by in ("session", "token"):
        weights = token_weights(samples, by)  # type: ignore[arg-type]
        assert sum(float(each.sum()) for each in weights) == pytest.approx(1.0)
        assert all(not each[sample.loss_mask == 0].any() for each, sample in zip(weights, samples, strict=True))
    shares = [float(each.sum()) for each in token_weights(samples)]
    assert shares[0] + shares[1] == pytest.approx(shares[2])


def test_the_oldest_trained_token_decides_on_staleness() -> None:
    """Spans are told apart by token; what is kept is weighed anew; unknown versions are dropped unless kept."""
    traces = [trace(version=9), trace(version=5), trace(version=None)]
    samples = samples_of(result(traces=traces))
    assert [staleness(sample, 10) for sample in samples] == [1, 5, None]
    assert [sample.weight for sample in fresh(samples, 10, 2)] == [1.0]
    assert len(fresh(samples, 10, 2, unknown="keep")) == 2
    mixed = trace()
    mixed["metadata"]["certificate"]["policy_versions"] = [
        {"version": "8", "start": 0, "end": 2},
        {"version": "10", "start": 3, "end": 5},
    ]
    (sample,) = samples_of(result(traces=[mixed]))
    assert staleness(sample, 10) == 2


def test_padding_lines_up() -> None:
    """Prompts end where responses begin; taking the padding away gives the samples back."""
    samples = samples_of(result(traces=[trace(5, ((3, 2), (1, 0))), trace(2, ((1, 0),), seed=1)]))
    advantages(samples, "group_mean")
    found = padded(samples, pad_id=-1, prompt_length=6)
    assert found["input_ids"].shape == (2, 12) and found["responses"].shape == (2, 6)
    for row, sample in enumerate(samples):
        kept = found["attention_mask"][row] == 1
        assert found["input_ids"][row][kept].tolist() == sample.ids.tolist()
        assert found["position_ids"][row][kept].tolist() == list(range(len(sample)))
        assert found["response_mask"][row].sum() == sample.sampled_tokens
        assert found["logprobs"][row, : len(sample.response_ids)].tolist() == sample.logprobs.tolist()  # type: ignore
    with pytest.raises(SampleError, match="its prompt has 5 tokens, more than 4"):
        padded(samples, pad_id=0, prompt_length=4)


def test_packing_has_no_padding() -> None:
    """Samples stand end to end, each with positions of its own."""
    samples = samples_of(result(traces=[trace(5), trace(2, seed=1)]))
    found = packed(samples)
    assert found["starts"].tolist() == [0, len(samples[0]), len(samples[0]) + len(samples[1])]
    assert found["input_ids"].tolist() == [*samples[0].ids.tolist(), *samples[1].ids.tolist()]
    assert found["position_ids"][found["starts"][:-1]].tolist() == [0, 0]
    assert found["loss_mask"].sum() == sum(sample.sampled_tokens for sample in samples)


def same(one: Sample, other: Sample) -> bool:
    """Whether two samples agree in every field."""
    names = set(Sample.__slots__)
    arrays = {"prompt_ids", "response_ids", "loss_mask", "logprobs"}
    return all(getattr(one, name) == getattr(other, name) for name in names - arrays) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays
    )


def test_files_give_samples_back(tmp_path: Path) -> None:
    """JSON lines and Arrow hold every field, float32 to the last bit."""
    traces = [trace(version=3), trace(version="v", seed=1), trace(seed=2, trainable=False, response_logprobs=None)]
    samples = samples_of(result(traces=traces, metadata={"instance": 1}), trainable_only=False)
    advantages(samples[:2])
    path = tmp_path / "samples.jsonl"
    assert write_jsonl(path, samples[:1]) + write_jsonl(path, samples[1:], append=True) == 3
    table = to_arrow(samples)
    for found in (list(read_jsonl(path)), from_arrow(table, trainable_only=False)):
        assert all(same(one, other) for one, other in zip(samples, found, strict=True))
    assert len(from_arrow(table)) == 2 and from_arrow(table.slice(0, 0)) == []
    path.write_text('{"no": 1}\n')
    with pytest.raises(SampleError, match="line 1: is no sample"):
        list(read_jsonl(path))


def test_long_sessions_are_quick(tmp_path: Path) -> None:
    """100,000 tokens in 60 turns pass through everything in well under a second of CPU."""
    body = result(traces=[trace(20_000, tuple((1000, 333) for _ in range(60)))])
    began = time.process_time()
    samples = samples_of(body)
    advantages(samples)
    token_weights(samples)
    padded(samples, pad_id=0)
    packed(samples)
    (sample,) = from_arrow(to_arrow(samples))
    write_jsonl(tmp_path / "long.jsonl", samples)
    next(read_jsonl(tmp_path / "long.jsonl"))
    assert len(sample.segments()) == 120 and len(sample) == 99_980
    assert time.process_time() - began < 2.0
