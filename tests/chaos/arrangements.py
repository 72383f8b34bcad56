"""What some faults need before they can strike: a `polar up` with a clock of its own, or with a small disk.

Arranging one stops `polar up` and starts it again, so the faults that share one stand together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import libfaketime
import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from tests.chaos.scene import Scene

ROOM_BYTES = 64 << 20
"""What a small disk has beyond what is on it."""
LOG_BYTES = 20 << 20
"""More than a segment of the write-ahead log holds."""


def arrange(scene: Scene, name: str) -> bool:
    """Make it so, unless it is or any will do; whether `polar up` was started anew for that."""
    if name in ("", scene.arrangement):
        return False
    assert scene.stop() == 0, scene.log()
    scene.env, scene.arrangement = {}, name
    {"own clock": _own_clock, "small disk": _small_disk}[name](scene)
    scene.start()
    return True


def tidy(scene: Scene) -> None:
    """Leave no mount behind."""
    if _disk(scene).is_mount():
        subprocess.run(["umount", "--lazy", str(_disk(scene))], check=True)


def _own_clock(scene: Scene) -> None:
    library = next(Path(libfaketime.__file__).parent.rglob("libfaketime.so.1"))
    set_clock(scene, "+0")
    scene.env = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(scene.folder / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # nobody can set that one
    }


def set_clock(scene: Scene, offset: str) -> None:
    """So many seconds away from the true time, for all that has a clock of its own."""
    written = scene.folder / "clock.new"
    written.write_text(offset)
    written.rename(scene.folder / "clock")


def _disk(scene: Scene) -> Path:
    return scene.home / "postgres"


def _small_disk(scene: Scene) -> None:
    disk, before = _disk(scene), scene.home / "postgres.before"
    disk.rename(before)
    disk.mkdir(mode=0o700)
    used = sum(path.stat().st_size for path in before.rglob("*") if path.is_file())
    size = f"size={used + ROOM_BYTES},mode=0700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode:
        disk.rmdir()
        before.rename(disk)
        scene.start()
        pytest.skip(f"a small disk takes the right to mount one: {done.stderr.strip()}")
    shutil.copytree(before, disk, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(before)


@contextmanager
def full_disk(scene: Scene) -> Iterator[None]:
    """While inside, not a byte is free."""
    filler = _disk(scene) / "filler"
    with filler.open("wb") as file:
        found = os.statvfs(filler)
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)
    try:
        yield
    finally:
        filler.unlink()


def write_log(scene: Scene) -> bool:
    """Have Postgres log more than fits into what it has set aside; whether it refused."""
    try:
        scene.read(lambda db: db.execute(text(f"SELECT pg_logical_emit_message(false, '', repeat('x', {LOG_BYTES}))")))
    except SQLAlchemyError:
        return True
    return False
