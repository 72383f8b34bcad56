"""Results as an Arrow stream: one row for each trace, and one with empty trace columns for a session that has none.

Needs pyarrow, the extra `arrow`; without it, everything else works. Columns are made from the stored bytes as they are,
so a token array is never a Python list. With `full` unset the token columns are left out and only counted.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from polar.api import wire
from polar.delivery.feed import Ended
from polar.models import TraceRow

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
TOKENS = {"prompt_ids": np.int32, "response_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}
"""Columns of a trace that have one value a token, as `TraceRow` stores them."""


def available() -> bool:
    """Whether this process can write Arrow."""
    if "pyarrow" in sys.modules:
        return sys.modules["pyarrow"] is not None
    return importlib.util.find_spec("pyarrow") is not None


def stream(ended: Iterator[list[Ended]], *, full: bool) -> Iterator[bytes]:
    """The bytes of an IPC stream, a record batch for each list."""
    import pyarrow

    schema, sink = _schema(full), _Sink()
    with pyarrow.ipc.new_stream(sink, schema) as writer:
        for some in ended:
            writer.write_batch(_batch(some, schema, full))
            yield sink.taken()
    yield sink.taken()


def _schema(full: bool) -> Any:
    import pyarrow

    text, whole, real = pyarrow.string(), pyarrow.int32(), pyarrow.float64()
    columns = {
        "cursor": pyarrow.int64(),
        **dict.fromkeys(("session_id", "task_id", "group_id", "status", "error"), text),
        "trace": whole,
        **dict.fromkeys(("prompt_tokens", "response_tokens"), whole),
        **dict.fromkeys(("reward", "weight"), real),
        "trainable": pyarrow.bool_(),
        **dict.fromkeys(("fidelity", "certificate"), text),
    }
    if full:
        columns |= {name: pyarrow.large_list(pyarrow.from_numpy_dtype(kind)) for name, kind in TOKENS.items()}
    return pyarrow.schema(list(columns.items()))


def _batch(some: list[Ended], schema: Any, full: bool) -> Any:
    import pyarrow

    rows: list[tuple[Ended, TraceRow | None]] = []
    for each in some:
        traces = each.trajectory[1] if each.trajectory else []
        rows += [(each, trace) for trace in traces] or [(each, None)]
    shown = [_row(each, trace) for each, trace in rows]
    arrays = []
    for field in schema:
        if full and field.name in TOKENS:
            arrays.append(_tokens([getattr(trace, field.name, None) for _, trace in rows], TOKENS[field.name]))
        else:
            arrays.append(pyarrow.array([row.get(field.name) for row in shown], field.type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _row(ended: Ended, trace: TraceRow | None) -> dict[str, Any]:
    whole = {
        "cursor": ended.number,
        "session_id": ended.session.id,
        "task_id": ended.task.task_id,
        "group_id": ended.task.group_id,
        "status": wire.session_status(ended.session),
        "error": ended.session.error and ended.session.error["message"],
    }
    if trace is None:
        return whole
    return whole | {
        "trace": trace.number,
        "prompt_tokens": len(trace.prompt_ids) // 4,
        "response_tokens": len(trace.response_ids) // 4,
        "reward": trace.reward,
        "weight": trace.weight,
        "trainable": trace.trainable,
        "fidelity": trace.fidelity,
        "certificate": orjson.dumps(trace.certificate).decode(),
    }


def _tokens(stored: list[bytes | None], kind: Any) -> Any:
    """A list column from the bytes of each row; None is a row without."""
    import pyarrow

    sizes = [len(each or b"") // np.dtype(kind).itemsize for each in stored]
    ends = np.cumsum([0, *sizes], dtype=np.int64)
    values = pyarrow.array(np.frombuffer(b"".join(each or b"" for each in stored), kind))
    missing = pyarrow.array([each is None for each in stored])
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(ends), values, mask=missing)


class _Sink(io.RawIOBase):
    """Keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def taken(self) -> bytes:
        """Everything since the last time."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
