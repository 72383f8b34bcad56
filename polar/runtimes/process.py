"""Running one command on the node within limits, its output in files.

Used by the runtimes whose processes are the node's own; what the command line is (a shell, a sandbox around
one) and which environment it gets is theirs. Output goes straight to files, by the command's own hand: no
pipe can fill up, no thread copies, and a daemon left behind does not hold up the end of its command.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polar.errors import RuntimeFault
from polar.runtimes import tree
from polar.runtimes.base import OUTPUT_LIMIT, ExecResult, Limits

GRACE_SECONDS = 2.0
"""Between asking a command to stop and killing it."""
LOG_LIMIT = 64 * 1024 * 1024
"""Bytes that a command may write to one output file before its middle is cut out on disk, too."""
_POLL_SECONDS = 0.1
SIZE_CHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Command:
    """What to start."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    setup: Callable[[], None] | None = None
    """Runs in the child before its program; see environment.limiter."""
    prefix: str = ""
    """What a launcher takes off a variable's name before the program sees it, if it does."""


def shell_argv(command: str, cwd: str) -> list[str]:
    """The command line that runs a shell command in `cwd`."""
    shell = "bash" if shutil.which("bash") else "sh"
    # By the shell, so that a folder that is not there is the command's failure, in the shell's own words.
    return [shell, "-c", f"cd -- {shlex.quote(cwd)} || exit 126\n{command}"]


def run(command: Command, *, limits: Limits, scratch: Path, log: Path | None = None) -> ExecResult:
    """Run to the end. Without `log` the output files live in `scratch` and are removed.

    On time-out or cancellation, the whole tree is asked to stop and killed after a grace."""
    started = time.monotonic()
    if limits.cancelled.is_set():
        return ExecResult(None, cancelled=True)
    if limits.left() == 0:
        return ExecResult(None, timed_out=True)
    mark = uuid.uuid4().hex
    with output_files(log or scratch / mark, keep=log is not None) as (stdout, stderr):
        process = _start(command, mark, stdout, stderr)
        why = "interrupted"
        try:
            why = _wait(process, limits, (stdout, stderr))
        finally:
            # Also when an exception comes through: a command must not outlive the wish for it.
            if why:
                tree.end(lambda: tree.of_command(mark, process.pid), GRACE_SECONDS)
                process.wait()
        return ExecResult(
            exit_code=None if why else _exit_code(process.returncode),
            stdout=read_kept(stdout),
            stderr=read_kept(stderr),
            timed_out=why == "timed_out",
            cancelled=why == "cancelled",
            seconds=time.monotonic() - started,
        )


def read_kept(path: Path, limit: int = OUTPUT_LIMIT) -> str:
    """A file as text; of a long one the head and the tail, with a line between that says what is cut."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            return file.read(size).decode(errors="replace")
        head = file.read(limit // 2)
        file.seek(size - limit // 2)
        tail = file.read(limit // 2)
    cut = size - len(head) - len(tail)
    return f"{head.decode(errors='replace')}\n[{cut} bytes cut out here]\n{tail.decode(errors='replace')}"


@contextmanager
def output_files(base: Path, *, keep: bool) -> Iterator[tuple[Path, Path]]:
    """The paths of a command's two output files; they are removed at the end unless they are to be kept."""
    if keep:
        base.parent.mkdir(parents=True, exist_ok=True)
    paths = base.with_name(base.name + ".stdout"), base.with_name(base.name + ".stderr")
    try:
        yield paths
    finally:
        if not keep:
            for path in paths:
                path.unlink(missing_ok=True)


def _start(command: Command, mark: str, stdout: Path, stderr: Path) -> subprocess.Popen[bytes]:
    env = {**command.env, tree.COMMAND_MARK: mark, command.prefix + tree.COMMAND_MARK: mark}
    try:
        with opened(stdout) as out, opened(stderr) as err:
            return subprocess.Popen(
                list(command.argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                cwd=command.cwd,
                start_new_session=True,
                preexec_fn=command.setup,
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # A workspace that is gone, a command or variable over 128 kB, a NUL character, a limit the kernel refuses.
        raise RuntimeFault(f"cannot start {command.argv[0]}: {error}", retryable=False) from error


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """An output file, emptied, for a command to write to."""
    # Appending, so that a command whose file is cut short goes on at its new end.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _wait(process: subprocess.Popen[bytes], limits: Limits, outputs: Sequence[Path]) -> str:
    """Sleep until the first process ends or a limit is hit; which limit, or an empty string."""
    descriptor = os.pidfd_open(process.pid)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        look_at_size = time.monotonic() + SIZE_CHECK_SECONDS
        while True:
            left = limits.left()
            pause = _POLL_SECONDS if left is None else min(_POLL_SECONDS, left)
            if ended.poll(pause * 1000):
                process.wait()
                return ""
            if limits.cancelled.is_set():
                return "cancelled"
            if limits.left() == 0:
                return "timed_out"
            if time.monotonic() >= look_at_size:
                look_at_size = time.monotonic() + SIZE_CHECK_SECONDS
                for path in outputs:
                    cut_on_disk(path)
    finally:
        os.close(descriptor)


def cut_on_disk(path: Path) -> None:
    """Keep the head and the tail of an output file that grew past its limit, while it is being written."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_LIMIT:
            kept = read_kept(path).encode()
            os.truncate(path, 0)
            with path.open("ab") as file:
                file.write(kept)


def _exit_code(returned: int) -> int:
    """A death by signal is shown as a shell shows it."""
    return returned if returned >= 0 else 128 - returned
