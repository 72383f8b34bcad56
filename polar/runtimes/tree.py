"""Finding and ending processes on the node, also those that a dead worker started.

Parent-death signals would not do: they follow the thread that forked, and a worker's threads end for good
reasons. Instead every process carries a marker in its environment, which children inherit, daemons included,
and which any process of the same user can read in /proc. What drops its environment is still found by its
process group, by its parents while they live, and by a working directory inside the workspace.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from polar.errors import RuntimeFault

RUNTIME_MARK = "POLAR_RUNTIME"
"""Names the workspace that a process belongs to."""
COMMAND_MARK = "POLAR_COMMAND"
"""Names the one command that a process belongs to."""
KILL_SECONDS = 10.0
_POLL_SECONDS = 0.02
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD, in the flags of /proc/<pid>/stat."""
_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class Found:
    """A live process, as /proc shows it."""

    pid: int
    parent: int
    group: int
    sitting: int
    """Its session, in the kernel's sense of the word."""
    terminal: int


def processes() -> dict[int, Found]:
    """Every live process of a program; zombies are not alive, and the kernel's own threads are nobody's."""
    found = {}
    for pid in _numbers():
        stat = _read(f"/proc/{pid}/stat")
        if not stat:
            continue
        # The name stands in parentheses and may hold any character, so the fields begin after the last one.
        state, parent, group, sitting, terminal, _, flags, _ = stat[stat.rindex(b")") + 2 :].split(None, 7)
        if state not in b"ZX" and not int(flags) & _KERNEL_THREAD:
            found[pid] = Found(pid, int(parent), int(group), int(sitting), int(terminal))
    return found


def of_runtime(mark: str, folder: Path) -> set[int]:
    """The processes of a workspace, whoever started them."""
    # Mostly there are none, and then nobody's descendants are asked for: a stat costs as much as all else together.
    if not any(_works_in(pid, str(folder)) or _carries(pid, RUNTIME_MARK, mark) for pid in _numbers()):
        return set()
    table = processes()
    # A person at a terminal may have gone into the folder to look: a shell of theirs is not ours to kill.
    inside = {pid for pid, found in table.items() if not found.terminal and _works_in(pid, str(folder))}
    return _family(table, inside | {pid for pid in table if _carries(pid, RUNTIME_MARK, mark)})


def of_command(mark: str, leader: int) -> set[int]:
    """The processes of one command, whose first process is or was `leader`."""
    table = processes()
    grouped = {pid for pid, found in table.items() if leader in (pid, found.group, found.sitting)}
    return _family(table, grouped | {pid for pid in table if _carries(pid, COMMAND_MARK, mark)})


def of_namespace(leader: int) -> set[int]:
    """The processes in the process namespace of `leader`, which stands first in it, and in those below; without it."""
    namespace = _namespace(leader)
    if namespace is None or namespace == _namespace(os.getpid()):
        return set()
    table = processes()
    return _family(table, {pid for pid in table if _namespace(pid) == namespace}) - {leader}


def end(find: Callable[[], Set[int]], grace_seconds: float = 0.0) -> None:
    """Ask what `find` finds to stop, and kill what is left after the grace, until nothing is found.

    Raises RuntimeFault if something cannot be killed."""
    if grace_seconds > 0:
        _signal(find(), signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while find() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + KILL_SECONDS
    while left := find():
        if time.monotonic() > deadline:
            raise RuntimeFault(
                f"processes {sorted(left)} outlive SIGKILL; they hang in the kernel, look at their disks"
            )
        # Again and again: what is being forked while we look is found in the next round.
        _signal(left, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _signal(pids: Set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # ended meanwhile, or its number is another user's now
            continue


def _family(table: dict[int, Found], roots: set[int]) -> set[int]:
    """`roots` with all their live descendants."""
    children: dict[int, list[int]] = {}
    for found in table.values():
        children.setdefault(found.parent, []).append(found.pid)
    family: set[int] = set()
    waiting = list(roots - {os.getpid()})
    while waiting:
        pid = waiting.pop()
        if pid not in family:
            family.add(pid)
            waiting.extend(children.get(pid, ()))
    return family


def _numbers() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - a Path costs more


def _namespace(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:  # ended meanwhile, or another user's
        return None


def _carries(pid: int, variable: str, value: str) -> bool:
    text = _read(f"/proc/{pid}/environ")
    return text is not None and f"\0{variable}={value}\0".encode() in b"\0" + text + b"\0"


def _works_in(pid: int, folder: str) -> bool:
    try:
        place = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115 - a Path costs more than the call
    except OSError:  # ended meanwhile, or another user's
        return False
    return place == folder or place.startswith(f"{folder}/")


def _read(path: str) -> bytes | None:
    """A file of /proc; None if its process ended meanwhile, or is another user's.

    Without a file object or a Path: every session that ends reads these of every process of the machine."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = bytearray()
        # A part that is shorter than was asked for is the last one: no second call to hear that nothing follows.
        while part := os.read(descriptor, _READ):
            found += part
            if len(part) < _READ:
                break
        return bytes(found)
    except OSError:
        return None
    finally:
        os.close(descriptor)
