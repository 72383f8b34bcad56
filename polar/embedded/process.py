"""Child processes that cannot outlive their parent.

Leaves to others: what is started and in which order (supervisor.py), and when a server counts as ready (service.py).

A child's parent-death signal is tied to the *thread* that forked it, not to the process: call `spawn` from a thread
that lives as long as the supervisor (its main thread), or the child is signalled as soon as that thread ends.
The signal reaches the direct child only. A child with children of its own must end them when it is told to stop, or be
given a `death_signal` that makes it do so.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from polar.embedded.errors import EmbeddedError

Process = subprocess.Popen[bytes]

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER = 0x10000000
_STOP_POLL_SECONDS = 0.02


@functools.cache
def _libc() -> ctypes.CDLL:
    if not sys.platform.startswith("linux"):
        raise EmbeddedError(
            "the embedded servers run on Linux only; start Postgres and Redis or Valkey yourself and give "
            "Polar their URLs"
        )
    return ctypes.CDLL(None, use_errno=True)


def _child_setup(death_signal: signal.Signals, as_user: int | None) -> Callable[[], None]:
    """Return what runs between fork and exec.

    Only one thread survives a fork and any lock another one held stays locked, so everything that could need a lock
    (loading libc, looking up symbols, formatting) is done here, before the fork.
    """
    libc = _libc()
    prctl, unshare = libc.prctl, libc.unshare
    parent = os.getpid()
    number = int(death_signal)
    maps: list[tuple[str, bytes]] = []
    if as_user is not None:
        maps = [
            ("/proc/self/setgroups", b"deny"),
            ("/proc/self/uid_map", f"{as_user} {os.geteuid()} 1".encode()),
            ("/proc/self/gid_map", f"{as_user} {os.getegid()} 1".encode()),
        ]

    def setup() -> None:
        if maps and unshare(_CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        for path, text in maps:
            descriptor = os.open(path, os.O_WRONLY)
            os.write(descriptor, text)
            os.close(descriptor)
        # After the namespace, because a change of credentials clears the signal.
        if prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != parent:  # it died before the signal was set, so the signal will never come
            os._exit(1)

    return setup


def spawn(
    argv: Sequence[str],
    *,
    log_path: Path,
    env: Mapping[str, str],
    name: str,
    as_user: int | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
    stdin: IO[bytes] | None = None,
) -> Process:
    """Start `argv` in its own session, its output appended to `log_path`; it gets `death_signal` when we die.

    `as_user` is the uid that the child sees itself as, inside a user namespace that maps it to ours: for programs
    that refuse to run as root. Its files still belong to us, and it has no privileges besides.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    setup = _child_setup(death_signal, as_user)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=log,
            stderr=log,
            env=dict(env),
            start_new_session=True,
            preexec_fn=setup,
        )
    except subprocess.SubprocessError as error:
        hint = "this kernel refused its parent-death signal; start the servers yourself and give Polar their URLs"
        if as_user is not None:
            hint = (
                "it refuses to run as root, and this machine does not allow user namespaces; "
                "run Polar as an ordinary user, or give it the URL of your own server"
            )
        raise EmbeddedError(f"cannot start {name}: {hint}") from error
    except OSError as error:
        raise EmbeddedError(
            f"cannot start {name}: {error.strerror}: {argv[0]}; check that the program is installed and that this user "
            "may run it"
        ) from error
    finally:
        os.close(log)


def has_exited(proc: Process) -> bool:
    """Say whether `proc` has ended, without reaping it: until then its process group's number stays its own."""
    if proc.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, proc.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _signal_group(proc: Process, number: signal.Signals) -> None:
    try:
        os.killpg(proc.pid, number)
    except ProcessLookupError:
        return


def reap(proc: Process) -> int:
    """Kill what is left of an ended process's group, collect it and return its exit status (negative: a signal)."""
    if proc.returncode is None:
        _signal_group(proc, signal.SIGKILL)
    return proc.wait()


def stop(
    proc: Process,
    grace_seconds: float,
    *,
    stop_signal: signal.Signals = signal.SIGTERM,
    hurry: Callable[[], bool] = lambda: False,
) -> int:
    """Ask the group of `proc` to stop, kill it after `grace_seconds` or once `hurry` says so, and return its status."""
    if proc.returncode is None and not has_exited(proc):
        _signal_group(proc, stop_signal)
        deadline = time.monotonic() + grace_seconds
        while not has_exited(proc) and time.monotonic() < deadline and not hurry():
            time.sleep(_STOP_POLL_SECONDS)
    return reap(proc)


def describe_exit(status: int) -> str:
    """Put an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def processes_in(folder: Path, program: str) -> list[int]:
    """Return the processes named `program` that work inside `folder`.

    A server's pid file cannot tell this: after a crash its number may belong to any other program.
    """
    wanted = os.path.realpath(folder)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            cwd = str((entry / "cwd").readlink())
            executable = (entry / "exe").readlink().name.removesuffix(" (deleted)")
        except OSError:  # it ended meanwhile, or is another user's and so cannot hold our folder
            continue
        if cwd == wanted and executable == program:
            found.append(int(entry.name))
    return found
