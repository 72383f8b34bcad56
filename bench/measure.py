"""What benchmarks measure processes with, and how they start them."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CPUCLOCK_SCHED = 2


def _parents() -> dict[int, int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return parents


def children(root: int) -> list[int]:
    """The processes that a process started itself, and that live."""
    return sorted(pid for pid, parent in _parents().items() if parent == root)


def family(root: int) -> set[int]:
    """A process and all its descendants."""
    parents = _parents()
    found, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found


def process_cpu(pid: int) -> float:
    """CPU seconds that one process has used, its threads that ended included; 0 if it is gone."""
    try:
        # Linux's clock of another process, as clock_getcpuclockid(3) names it: exact where /proc counts in 10 ms.
        return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def tree_cpu(root: int) -> float:
    """CPU seconds that a process and all its descendants have used."""
    return sum(process_cpu(pid) for pid in family(root))


def tree_memory(root: int) -> int:
    """Bytes of memory that are a process's and its descendants' own."""
    total = 0
    for pid in family(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")) << 10
    return total


@contextmanager
def server(argv: list[str], health: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process of its own, answering while inside."""
    process = subprocess.Popen(argv, env={**os.environ, **env})
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(health, timeout=1):
                    break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError(f"{argv[:4]} ended with {process.returncode}") from None
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(20)
