"""Exports of results made by hand: what is taken, how it is put together, where it ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from polar.client import SessionResult
from polar.exporting import Exported, Filters, Kind, Preference, Rejection, Sft, Split, SplitError, export
from tests.fakes.results import result, trace


def made(name: str, group: str = "g", reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    """A session of one trace; `changes` are the trace's own, but for harness and ended_at."""
    told = {word: changes.pop(word) for word in ("harness", "ended_at") if word in changes}
    found = result(name, f"task-{group}", [trace(reward=reward, **changes)], metadata={"group_id": group})
    found["metadata"] |= told
    return found


def exported(folder: Path, raw: Iterable[dict[str, Any]], kind: Kind = Sft(), **options: Any) -> Exported:
    """An export of these results; the summary of each has no tokens, as the API has it."""
    raw = list(raw)

    def read(full: bool) -> Iterable[SessionResult]:
        return (SessionResult.read(each if full else summary(each)) for each in raw)

    return export(read, folder, kind, **options)


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """A result without token arrays."""
    arrays = ("prompt_ids", "response_ids", "loss_mask", "response_logprobs", "prompt_messages", "response_messages")
    copied: dict[str, Any] = json.loads(json.dumps(raw))
    for each in copied["trajectory"]["traces"]:
        for name in arrays:
            each.pop(name)
    return copied


def rows(path: Path) -> list[dict[str, Any]]:
    """Lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_has_the_messages_and_the_sampled_tokens(tmp_path: Path) -> None:
    """Mask and log-probabilities stand beside the whole stream, zero where nothing was sampled."""
    given = made("a", harness="pi", ended_at=5.0)
    exported(tmp_path, [given])
    (row,) = rows(tmp_path / "train.jsonl")
    (shown,) = given["trajectory"]["traces"]
    assert row["input_ids"] == shown["prompt_ids"] + shown["response_ids"]
    assert row["loss_mask"] == [0] * len(shown["prompt_ids"]) + shown["loss_mask"]
    assert row["logprobs"] == [0.0] * len(shown["prompt_ids"]) + shown["response_logprobs"]
    assert [each["role"] for each in row["messages"]] == ["user", "assistant"]
    assert (row["session_id"], row["group"], row["harness"], row["reward"]) == ("a", "g", "pi", 1.0)


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        (Filters(min_reward=0.5), "reward"),
        (Filters(max_reward=0.1), "reward"),
        (Filters(), "fidelity"),
        (Filters(fidelity=("exact", "drifted")), "not trainable"),
        (Filters(harness=("pi",)), "harness"),
        (Filters(since=10.0), "time"),
        (Filters(until=5.0), "time"),
        (Filters(tasks=("swe-*",)), "task"),
    ],
)
def test_what_is_left_out_is_counted_by_why(tmp_path: Path, filters: Filters, reason: str) -> None:
    """A session that does not pass is in no file, and the manifest says for which reason first."""
    given = made("a", reward=0.2, fidelity="drifted", trainable=False, harness="codex", ended_at=5.0)
    done = exported(tmp_path, [given], filters=filters)
    assert (done.rows, dict(done.left_out)) == (0, {reason: 1})
    assert json.loads((tmp_path / "manifest.json").read_text())["left_out"] == {reason: 1}


def test_stale_is_no_reason(tmp_path: Path) -> None:
    """A trace that came too late for its trainer is good for data; a ghost is not, unless it is asked for."""
    stale = made("a", trainable=False, decision={"rule": "stale_at_delivery", "reason": "too old"})
    ghost = made("b", trainable=False, decision={"rule": "ghost", "reason": "nobody got it"})
    assert exported(tmp_path, [stale, ghost]).rows == 1
    assert exported(tmp_path, [stale, ghost], filters=Filters(untrainable=True)).rows == 2


def test_rejection_keeps_the_best_of_each_group(tmp_path: Path) -> None:
    """Of a group its best, whatever order they come in; the others are counted."""
    given = [made("a", "x", 0.2), made("b", "y", 1.0), made("c", "x", 0.9), made("d", "x", None), made("e", "y", 0.8)]
    done = exported(tmp_path, given, Rejection(keep=1), filters=Filters(min_reward=0.2))
    assert [row["session_id"] for row in rows(tmp_path / "train.jsonl")] == ["b", "c"]
    assert dict(done.left_out) == {"no reward": 1, "not picked": 2}


def test_a_tie_is_broken_by_the_seed_and_not_by_the_order(tmp_path: Path) -> None:
    """The same sessions are kept however they come; another seed keeps others."""
    given = [made(f"s{number}") for number in range(20)]

    def kept(order: Iterable[dict[str, Any]], seed: int) -> str:
        exported(tmp_path, order, Rejection(seed))
        return str(rows(tmp_path / "train.jsonl")[0]["session_id"])

    assert kept(given, 1) == kept(reversed(given), 1)
    assert len({kept(given, seed) for seed in range(8)}) > 1


def test_pairs_are_of_one_group_and_apart(tmp_path: Path) -> None:
    """The best with the worst, the second best with the second worst, and none that is not better by the margin."""
    rewards = {"a": 1.0, "b": 0.9, "c": 0.85, "d": 0.0}
    given = [made(name, "x", reward) for name, reward in rewards.items()] + [made("e", "y", 1.0), made("f", "y", 0.95)]
    exported(tmp_path, given, Preference(pairs=3, margin=0.1))
    (pair,) = rows(tmp_path / "train.jsonl")
    assert (pair["chosen_session"], pair["rejected_session"], pair["group"]) == ("a", "d", "x")
    assert pair["prompt"] == [{"role": "user", "content": "find a"}]
    assert pair["chosen"] == [{"role": "assistant", "content": "found"}]
    assert len(pair["chosen_input_ids"]) == len(pair["chosen_loss_mask"])
    assert exported(tmp_path, given, Preference(pairs=3, margin=0.04)).rows == 3


def test_no_group_is_in_two_splits(tmp_path: Path) -> None:
    """Shares are about right, every group is whole, and more data moves no group."""
    given = [made(f"s{number}", f"g{number % 100}") for number in range(400)]
    split = Split.read("train=0.8,val=0.1,test=0.1", seed=3)
    done = exported(tmp_path / "a", given, split=split)
    groups = {name: {row["group"] for row in rows(tmp_path / "a" / f"{name}.jsonl")} for name, _ in split.shares}
    assert sum(map(len, groups.values())) == 100 == len(set().union(*groups.values()))
    assert 70 <= len(groups["train"]) <= 90 and groups["val"] and groups["test"]
    assert {name: each["groups"] for name, each in done.splits.items()} == {name: len(x) for name, x in groups.items()}
    exported(tmp_path / "b", given[:150], split=split)
    for name, _ in split.shares:
        assert {row["group"] for row in rows(tmp_path / "b" / f"{name}.jsonl")} <= groups[name]


def test_the_same_data_give_the_same_files(tmp_path: Path) -> None:
    """Byte for byte, manifest and all; the manifest's hashes are of the files."""
    given = [made(f"s{number}", f"g{number % 5}", number % 3 / 2) for number in range(30)]
    for name in ("a", "b"):
        exported(tmp_path / name, given, Preference(seed=7), split=Split.read("train=0.5,test=0.5", 7))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for each in json.loads((tmp_path / "a" / "manifest.json").read_text())["files"].values():
        assert hashlib.sha256((tmp_path / "a" / each["file"]).read_bytes()).hexdigest() == each["sha256"]


@pytest.mark.parametrize("kind", [Sft(), Preference()])
def test_parquet_says_the_same(tmp_path: Path, kind: Kind) -> None:
    """Tokens are numbers in columns of their type, what is nested is JSON text, and a split of nothing is a file."""
    given = [made("a", reward=1.0), made("b", reward=0.0, response_logprobs=None)]
    exported(tmp_path, given, kind, filters=Filters(), split=Split.read("train=0.999999,test=0.000001"))
    exported(tmp_path, given, kind, form="parquet", split=Split.read("train=0.999999,test=0.000001"))
    table = pyarrow.parquet.read_table(tmp_path / "train.parquet")
    lines = rows(tmp_path / "train.jsonl")
    assert table.num_rows == len(lines) and (tmp_path / "test.jsonl").read_text() == ""
    assert pyarrow.parquet.read_table(tmp_path / "test.parquet").schema == table.schema
    for read, line in zip(table.to_pylist(), lines, strict=True):
        assert list(read) == list(line) == list(kind.columns)
        for name, value in line.items():
            if name.endswith("logprobs"):
                assert read[name] == (None if value is None else pytest.approx(value))
            elif isinstance(value, list) and not name.endswith(("input_ids", "loss_mask")):
                assert json.loads(read[name]) == value
            else:
                assert read[name] == value


@pytest.mark.parametrize("text", ["train", "train=x", "train=0.5", "a=0.5,a=0.5", "a=1.5,b=-0.5", "../a=1"])
def test_a_split_that_is_none_is_refused(text: str) -> None:
    """Shares must be positive, make a whole, and be called something that can be a file."""
    with pytest.raises(SplitError):
        Split.read(text)


def test_a_reader_that_breaks_leaves_no_file(tmp_path: Path) -> None:
    """A file has its name only once it is whole."""

    def read(full: bool) -> Iterable[SessionResult]:
        yield SessionResult.read(made("a"))
        if full:
            raise ConnectionError("gone")
        yield SessionResult.read(made("b"))

    with pytest.raises(ConnectionError):
        export(read, tmp_path, Sft())
    assert list(tmp_path.iterdir()) == []
