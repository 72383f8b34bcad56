"""Samples to files and back: JSON lines for anything, Arrow for many tokens (needs pyarrow, the extra `arrow`).

The Arrow columns are those of the results feed, so `from_arrow` reads a page of the feed as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar.trainers.samples import Sample, SampleError, Span, checked

TOKENS: dict[str, Any] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
}
PLAIN = ("session_id", "task_id", "group_id", "trace", "reward", "weight", "advantage", "trainable")
TEXT = ("fidelity", "finish_reason", "status")
NESTED = ("versions", "flags", "metadata")


def write_jsonl(path: Path, samples: Iterable[Sample], *, append: bool = False) -> int:
    """One object a line; how many were written."""
    count = 0
    with path.open("ab" if append else "wb") as file:
        for sample in samples:
            fields = {name: getattr(sample, name) for name in (*TOKENS, *PLAIN, *TEXT, *NESTED, "turns")}
            file.write(orjson.dumps(fields, list, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def read_jsonl(path: Path) -> Iterator[Sample]:
    """What `write_jsonl` wrote, a line at a time. Raises SampleError with the line's number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _sample(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise SampleError(f"{path}, line {number}: is no sample ({error})") from error


def to_arrow(samples: Sequence[Sample]) -> Any:
    """A pyarrow.Table, one row a sample."""
    import pyarrow

    columns: dict[str, Any] = {name: _column(samples, name, kind) for name, kind in TOKENS.items()}
    columns |= {name: pyarrow.array([getattr(each, name) for each in samples], _kind(name)) for name in (*PLAIN, *TEXT)}
    columns["turns"] = pyarrow.array([each.turns for each in samples], pyarrow.int32())
    for name in NESTED:
        columns[name] = pyarrow.array([orjson.dumps(getattr(each, name), list).decode() for each in samples])
    return pyarrow.table(columns)


def from_arrow(table: Any, *, trainable_only: bool = True) -> list[Sample]:
    """Samples of a table that `to_arrow` made, or of the results feed; rows of sessions without a trace are left out.

    Token arrays are views of the table's memory."""
    table = table.combine_chunks()
    tokens = {name: _views(table.column(name)) for name in TOKENS}
    others = {name: table.column(name).to_pylist() for name in table.column_names if name not in TOKENS}
    samples = []
    for row, trace in enumerate(others["trace"]):
        if trace is None or (trainable_only and not others["trainable"][row]):
            continue
        fields = {name: values[row] for name, values in others.items()}
        for name in NESTED:
            if isinstance(fields.get(name), str):
                fields[name] = orjson.loads(fields[name])
        if "certificate" in fields:
            fields |= _of_the_feed(fields)
        samples.append(_sample({**fields, **{name: views[row] for name, views in tokens.items()}}))
    return samples


def _of_the_feed(fields: dict[str, Any]) -> dict[str, Any]:
    """What the feed keeps in the certificate; its group is the task, as `samples_of` has it."""
    certificate = orjson.loads(fields["certificate"])
    named = {} if fields["group_id"] is None else {"group_id": fields["group_id"]}
    return {
        "versions": [[each["version"], each["start"], each["end"]] for each in certificate["policy_versions"]],
        "flags": certificate["flags"],
        "turns": certificate["completions"],
        "group_id": fields["task_id"],
        "metadata": named,
    }


def _sample(fields: dict[str, Any]) -> Sample:
    arrays: dict[str, Any] = {
        name: None if fields[name] is None else np.asarray(fields[name], kind) for name, kind in TOKENS.items()
    }
    plain: dict[str, Any] = {name: fields.get(name) for name in PLAIN}
    sample = Sample(
        **arrays,
        **plain,
        versions=tuple(Span(*each) for each in fields.get("versions") or ()),
        flags=tuple(fields.get("flags") or ()),
        metadata=fields.get("metadata") or {},
        fidelity=fields["fidelity"],
        finish_reason=fields.get("finish_reason"),
        status=fields["status"],
        turns=fields.get("turns") or 0,
    )
    return checked(sample)


def _kind(name: str) -> Any:
    import pyarrow

    kinds = {"trace": pyarrow.int32(), "trainable": pyarrow.bool_()}
    kinds |= dict.fromkeys(("reward", "weight", "advantage"), pyarrow.float64())
    return kinds.get(name, pyarrow.string())


def _column(samples: Sequence[Sample], name: str, kind: Any) -> Any:
    import pyarrow

    arrays = [getattr(each, name) for each in samples]
    ends = np.cumsum([0, *(0 if each is None else len(each) for each in arrays)], dtype=np.int64)
    there = [np.asarray(each, kind) for each in arrays if each is not None]
    values = pyarrow.array(np.concatenate(there) if there else np.zeros(0, kind))
    missing = pyarrow.array([each is None for each in arrays], pyarrow.bool_())
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(ends), values, mask=missing)


def _views(column: Any) -> list[Any]:
    chunk = column.chunk(0) if column.num_chunks else None
    if chunk is None:
        return []
    values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy().tolist()
    valid = chunk.is_valid().to_pylist()
    return [values[start:end] if ok else None for start, end, ok in zip(offsets, offsets[1:], valid, strict=False)]
