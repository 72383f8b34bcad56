"""Rows to files: JSON lines, or Parquet where pyarrow is there. A file has its name only once it is whole.

Parquet has columns of numbers for tokens, and JSON text for what is nested differently from row to row (messages,
tools, flags).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from polar.client.types import Json

ROW_GROUP_TOKENS = 1 << 20
"""Held before they are written as one row group of Parquet."""
BLOCK = 1 << 20
TYPES = {
    "input_ids": "list of int32",
    "loss_mask": "list of uint8",
    "logprobs": "list of float32",
    "reward": "float64",
    "ended_at": "float64",
    "trace": "int32",
}


class Lines:
    """JSON lines."""

    suffix = "jsonl"

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.rows, self.tokens = path, 0, 0
        self._part = path.with_name(path.name + ".part")
        self._file = self._part.open("wb")

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
        if kind is None:
            self._part.replace(self.path)
        else:
            self._part.unlink()

    def write(self, row: Json) -> None:
        """One row more."""
        self.rows += 1
        self.tokens += tokens(row)
        self._add(row)

    def described(self) -> Json:
        """For the manifest, once it is closed."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return {"file": self.path.name, "rows": self.rows, "tokens": self.tokens, "sha256": digest.hexdigest()}

    def _add(self, row: Json) -> None:
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def _close(self) -> None:
        self._file.close()


class Parquet(Lines):
    """Parquet, a row group at a time."""

    suffix = "parquet"

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        import pyarrow.parquet

        super().__init__(path, columns)
        self._schema = pyarrow.schema([(name, _type(name)) for name in columns])
        self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._held: list[Json] = []
        self._held_tokens = 0

    def _add(self, row: Json) -> None:
        self._held.append({name: value if _typed(name) else _text(value) for name, value in row.items()})
        self._held_tokens += tokens(row)
        if self._held_tokens >= ROW_GROUP_TOKENS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        if self._held:
            self._writer.write_table(pyarrow.Table.from_pylist(self._held, self._schema))
        self._held, self._held_tokens = [], 0

    def _close(self) -> None:
        self._flush()
        self._writer.close()
        super()._close()


FORMATS: dict[str, type[Lines]] = {kind.suffix: kind for kind in (Lines, Parquet)}


def tokens(row: Json) -> int:
    """How many it has, in all its streams."""
    return sum(len(value) for name, value in row.items() if name.endswith("input_ids"))


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


def _typed(name: str) -> str | None:
    """The type of what is not text, by the column's name: a column of nothing has its type, too."""
    return TYPES.get(name.removeprefix("chosen_").removeprefix("rejected_"))


def _type(name: str) -> Any:
    import pyarrow

    kind = _typed(name) or "string"
    item = kind.removeprefix("list of ")
    return pyarrow.type_for_alias(item) if item == kind else pyarrow.list_(pyarrow.type_for_alias(item))
