"""A session's logs on this machine's disk: which files there are, and a piece of one. Other nodes have their own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flask import current_app

from polar.errors import NotFoundError

PIECE = 64 << 10
FOLDER = re.compile(r"attempt-(\d+)")
FINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")
"""Ids that are safe as a folder's name."""


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file of one attempt."""

    attempt: int
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a file."""

    file: LogFile
    start: int
    end: int
    text: str


def files_of(session_id: str) -> list[LogFile]:
    """Everything that is kept of it here, by attempt and name."""
    root = _root(session_id)
    if root is None or not root.is_dir():
        return []
    found = []
    for folder in root.iterdir():
        number = FOLDER.fullmatch(folder.name)
        if number is None or folder.is_symlink():
            continue
        for path in folder.iterdir():
            # What an agent may have made in place of a file must not lead out of the folder.
            if path.is_file() and not path.is_symlink():
                found.append(LogFile(int(number[1]), path.name, path.stat().st_size))
    return sorted(found, key=lambda file: (file.attempt, file.name))


def read(session_id: str, attempt: int, name: str, start: int) -> Piece:
    """A piece of a file from `start` on; -1 for its end. Raises NotFoundError."""
    file = next((each for each in files_of(session_id) if (each.attempt, each.name) == (attempt, name)), None)
    root = _root(session_id)
    if file is None or root is None:
        raise NotFoundError(f"this machine has no log {name!r} of attempt {attempt}")
    begin = max(0, file.size - PIECE) if start < 0 else min(start, file.size)
    with (root / f"attempt-{attempt}" / name).open("rb") as opened:
        opened.seek(begin)
        data = opened.read(PIECE)
    return Piece(file, begin, begin + len(data), data.decode(errors="replace"))


def _root(session_id: str) -> Path | None:
    if FINE.fullmatch(session_id) is None:
        return None
    home: Path = current_app.config["POLAR"].home_path
    return home / "logs" / "sessions" / session_id
