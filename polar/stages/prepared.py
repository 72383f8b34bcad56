"""Prepared states: what the prepare steps of a task with `prepare_once` made, kept on the node, to be copied.

A state is made by a runtime that belongs to no session: it has none of a session's variables, no agent was ever in
it, and it is removed once its state is kept. Sessions start from copies. So nothing of one session can come to
another this way, whatever it does to its copy. A state's name is a hash of all it depends on: the runtime's spec,
what it starts from, the steps, and every byte that they upload. Steps whose outcome differs from time to time are
the task's to leave without `prepare_once`.

The folder of a node: `<key>/` is a state, `<key>.json` names the runtime that is making it, `<lock>.lock` is held
shared while a state is copied and alone while it is made or removed. The kernel lets go of it when a worker dies.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar import __version__, runtimes
from polar.errors import LostLeaseError, RuntimeFault
from polar.log import line
from polar.runtimes.base import Limits, Runtime
from polar.settings import Settings
from polar.spec import PrepareAction, RuntimeSpec

logger = logging.getLogger(__name__)
OWNER = "prepared-"
"""A runtime of such a session belongs to none."""
READY, CANNOT = ".ready", ".cannot"
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a node may keep."""

    states: int
    megabytes: int
    idle_seconds: float

    @classmethod
    def of(cls, settings: Settings) -> Bounds:
        return cls(settings.prepared_states, settings.prepared_mb, settings.prepared_idle_seconds)


def key_of(spec: RuntimeSpec, content: str, actions: Sequence[PrepareAction]) -> str:
    """The name of the state that these steps make of this runtime, which starts from `content`."""
    asked = spec.model_dump(mode="json", exclude={"prepare", "eval_prepare"})
    steps = [[action.model_dump(mode="json"), _source(action)] for action in actions]
    said = json.dumps([__version__, asked, content, steps], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


@contextmanager
def state(folder: Path, key: str, limits: Limits, make: Callable[[Path], None]) -> Iterator[Path | None]:
    """The state `key`, made by `make` if it is not there yet; it stays while inside. None if it cannot be kept.

    Sessions that want the same one wait for the first, within their own limits."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / key
    while True:
        with _locked(folder, key, limits, shared=True):
            if (place / CANNOT).exists():
                yield None
                return
            if (place / READY).exists():
                (place / READY).touch()
                yield place
                return
        with _locked(folder, key, limits, shared=False):
            if not (place / READY).exists() and not (place / CANNOT).exists():
                _make(place, make)


def trim(folder: Path, bounds: Bounds, *, everything: bool = False) -> int:
    """Remove states beyond the bounds, the longest unused first, and what dead workers left half made; how many.

    `everything`: all that is not being used just now."""
    if not folder.is_dir():
        return 0
    kept = sorted(
        ((ready.stat().st_mtime, ready.parent) for ready in (*folder.glob(f"*/{READY}"), *folder.glob(f"*/{CANNOT}"))),
        reverse=True,
    )
    room, unused_since, gone = bounds.megabytes << 20, time.time() - bounds.idle_seconds, 0
    for number, (used, place) in enumerate(kept):
        room -= _bytes(place)
        if everything or number >= bounds.states or room < 0 or used < unused_since:
            gone += _remove(folder, place)
    for half in folder.glob("*.json"):
        gone += _remove(folder, half.with_suffix(""))
    return gone


def half_made(folder: Path) -> set[Path]:
    """Workspaces of runtimes that are making a state, or died while they did."""
    found = set()
    for path in folder.glob("*.json"):
        try:
            found.add(Path(json.loads(path.read_text())["workspace"]))
        except (OSError, ValueError):  # made or removed at this moment
            continue
    return found


def keep(place: Path, runtime: Runtime, work: Callable[[Runtime], None]) -> None:
    """Have `runtime` started and prepared by `work`, keep its state in `place`, and remove it."""
    handle = place.with_suffix(".json")
    handle.write_text(json.dumps(runtime.handle()))
    try:
        work(runtime)
        runtime.kill_all()
        runtime.freeze(place)
    finally:
        runtime.destroy()
        handle.unlink(missing_ok=True)
    (place / "spec.json").write_text(runtime.spec.model_dump_json())


def _make(place: Path, make: Callable[[Path], None]) -> None:
    _clear(place)
    place.mkdir()
    started = time.monotonic()
    try:
        make(place)
    except RuntimeFault as error:
        if error.code != runtimes.CANNOT_KEEP:
            shutil.rmtree(place, ignore_errors=True)
            raise
        logger.warning(line("prepared state cannot be kept; every session prepares its own", cause=error.message))
        (place / CANNOT).write_text(error.message)
        return
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    (place / "bytes").write_text(str(_measure(place)))
    (place / READY).touch()
    spent = f"{time.monotonic() - started:.1f}"
    logger.info(line("prepared state kept", key=place.name, seconds=spent, mib=_bytes(place) >> 20))


def _remove(folder: Path, place: Path) -> bool:
    """Unless it is being used or made."""
    try:
        with _locked(folder, place.name, Limits(0), shared=False):
            _clear(place)
            return True
    except TimeoutError:
        return False


def _clear(place: Path) -> None:
    """Remove a state, and the runtime that was to make it, if a worker died over it."""
    handle = place.with_suffix(".json")
    if handle.exists():
        runtimes.attach(json.loads(handle.read_text())).destroy()
        handle.unlink()
    if (place / "spec.json").exists():
        spec = RuntimeSpec.model_validate_json((place / "spec.json").read_text())
        runtimes.runtime_class(spec).forget(place)
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _locked(folder: Path, key: str, limits: Limits, *, shared: bool) -> Iterator[None]:
    """Hold the key's lock. Raises TimeoutError without time, LostLeaseError when told to stop."""
    # Few files that stay, instead of one for each key: a lock file that is removed locks nobody out.
    descriptor = os.open(folder / f"{key[:2]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if limits.cancelled.is_set():
                    raise LostLeaseError("the session ended while it waited for a prepared state") from None
                if limits.left() == 0:
                    raise TimeoutError("no time left to wait for a prepared state") from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _bytes(place: Path) -> int:
    try:
        return int((place / "bytes").read_text())
    except (OSError, ValueError):
        return 0


def _measure(place: Path) -> int:
    """Bytes on disk, with what the runtime keeps elsewhere: it says so in a `*.json` of the state."""
    total = sum(entry.lstat().st_blocks * 512 for entry in place.rglob("*"))
    for path in place.glob("*.json"):
        said: Any = json.loads(path.read_text())
        total += int(said.get("bytes", 0))
    return total


def _source(action: PrepareAction) -> list[Any]:
    """Names, modes and contents of what an action uploads."""
    if action.source is None:
        return []
    top = Path(action.source).expanduser().resolve()
    found: list[Any] = [_entry(top, "")]
    for folder, folders, names in os.walk(top):
        folders.sort()
        found += [_entry(Path(folder, name), os.path.relpath(folder, top)) for name in sorted([*folders, *names])]
    return found


def _entry(path: Path, below: str) -> list[Any]:
    try:
        about = path.lstat()
    except FileNotFoundError:
        return [below, path.name, None]
    if path.is_symlink():
        return [below, path.name, "link", str(path.readlink())]
    content = None
    if path.is_file():
        content = _digest(str(path), about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return [below, path.name, about.st_mode, content]


@functools.lru_cache(maxsize=100_000)
def _digest(path: str, inode: int, size: int, changed: int, touched: int) -> str:
    """A file's content; read again only if the kernel says that it was written to."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
