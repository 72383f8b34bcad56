"""What must hold of any trajectory, whatever a harness did: for tests that know what the engine was given and gave."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar.builders.base import Built, Call, Ids, Trace


def check_traces(built: Built, calls: list[Call]) -> None:
    """Completions in are completions accounted for, each trained once, behind the very prompt that was sent."""
    by_id = {call.id: call for call in calls}
    where = built.stats["by_completion"]
    assert set(where) == set(by_id)
    trained: dict[str, int] = {}
    for trace in built.traces:
        lines = trace.metadata["completion_metadata"]
        stream = np.concatenate([trace.prompt_ids, trace.response_ids])
        expected = np.zeros(len(trace.response_ids), np.uint8)
        for line in lines:
            call, length = by_id[line["completion_id"]], line["end"] - line["start"]
            if "tree" not in trace.metadata:
                start = line["start"] + len(trace.prompt_ids)
                assert np.array_equal(stream[:start], call.prompt_ids)
            assert np.array_equal(trace.response_ids[line["start"] : line["end"]], call.output_ids[:length])
            if line["trained"]:
                trained[call.id] = trained.get(call.id, 0) + length
                expected[line["start"] : line["end"]] = 1
                if trace.logprobs is not None and call.logprobs is not None:
                    assert np.array_equal(trace.logprobs[line["start"] : line["end"]], call.logprobs[:length])
        assert np.array_equal(trace.loss_mask, expected)
        assert trace.logprobs is None or not trace.logprobs[expected == 0].any()
        assert trace.logprobs is not None or "missing_logprobs" in trace.certificate["flags"]
    placed = {name for name, place in where.items() if place.startswith("trace:")}
    assert trained.keys() == placed
    sampled = sum(len(by_id[name].output_ids) for name in placed)
    assert sum(trained.values()) + built.stats["tokens_trimmed"] == sampled
    for name in by_id.keys() - placed:
        assert where[name] in ("auxiliary", "hole", "failed", "aborted", "unanswered")


def check_tree(trace: Trace, calls: list[Call]) -> None:
    """What stands above each sampled node is the prompt that was sent, at the position that the table says."""
    by_id = {call.id: call for call in calls}
    table: list[dict[str, Any]] = trace.metadata["tree"]
    stream = np.concatenate([trace.prompt_ids, trace.response_ids])
    seen: dict[str, Ids] = {}
    for index, node in enumerate(table):
        assert node["parent"] < index
        assert node["start"] == (table[index - 1]["end"] if index else 0)
        above = path_above(stream, table, index)
        assert len(above) == node["position"]
        if node["sampled"]:
            name = node["completion_id"]
            done = seen.get(name, np.zeros(0, np.int32))
            assert np.array_equal(above, np.concatenate([by_id[name].prompt_ids, done]))
            seen[name] = np.concatenate([done, stream[node["start"] : node["end"]]])
    assert table[-1]["end"] == len(stream)
    assert {name: ids.tolist() for name, ids in seen.items()} == {
        name: by_id[name].output_ids.tolist() for name in trace.completion_ids
    }


def path_above(stream: Ids, table: list[dict[str, Any]], index: int) -> Ids:
    """The tokens that a node's first token was conditioned on."""
    parts = [np.zeros(0, np.int32)]
    while (index := table[index]["parent"]) >= 0:
        parts.insert(1, stream[table[index]["start"] : table[index]["end"]])
    return np.concatenate(parts)
