"""What the embedded servers keep in the data folder besides their data: the folder's lock and their secrets.

Leaves to others: the servers' own files, and which folder is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from polar.embedded.errors import EmbeddedError

LOCK_NAME = "polar.lock"


@contextlib.contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Hold the data folder `path` for this process; raise EmbeddedError when another one holds it.

    The kernel drops the lock with its holder, so a killed holder never blocks the next one. The file itself stays:
    removing it would let two processes lock two different files of one name.
    """
    import fcntl  # absent on Windows, where importing this module must still work

    path.mkdir(parents=True, exist_ok=True)
    lock = path / LOCK_NAME
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise EmbeddedError(
                f"another `polar up` (process {holder}) uses the folder {path}; stop it, or choose another data folder"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` in one step, readable by its owner only."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def read_or_make_secret(path: Path) -> tuple[str, bool]:
    """Return the secret in `path` and whether it was made just now."""
    try:
        secret = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        secret = ""
    if secret:
        return secret, False
    path.parent.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_urlsafe(24)
    write_private(path, secret + "\n")
    return secret, True
