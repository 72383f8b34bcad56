"""One command in a container: its output as it comes, and the end of its whole tree inside.

The command's first process is a small init that Docker itself puts into the container (`init: true`), made the
reaper of all it starts: a daemon that leaves its session, its group and its environment is still its
descendant. To end a command, a second one stops that init, so that nothing can leave it, asks the rest of the
tree to stop, kills what is left after a grace, and the init last. If that cannot be run, because the agent has
used up its processes, the container is restarted: files stay, processes do not.
"""

from __future__ import annotations

import os
import select
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import APIError
from docker.models.containers import Container

from polar.errors import RuntimeFault
from polar.runtimes import process
from polar.runtimes.base import ExecResult, Limits
from polar.runtimes.docker_daemon import client, faults

INIT = "/sbin/docker-init"
RUNNING = "/polar/run"
"""Holds, inside, the number of each running command's first process."""
LONGEST_WORD = 128 * 1024 - 1
"""Bytes of one argument or variable that Linux hands to a program."""
WRAPPER = """\
echo "$PPID" >"/polar/run/$1"
cd -- "$2" || exit 126
if command -v bash >/dev/null 2>&1; then exec bash -c "$3"; fi
exec sh -c "$3"
"""
END = """\
read -r leader <"/polar/run/$1" || exit 3
kill -STOP "$leader" 2>/dev/null || exit 0
tree() {
  table=
  for stat in /proc/[0-9]*/stat; do
    IFS= read -r words 2>/dev/null <"$stat" || continue
    pid=${words%% *}; words=${words##*) }
    state=${words%% *}; words=${words#* }
    [ "$state" = Z ] || table="$table $pid:${words%% *}"
  done
  found=" $leader "; grew=1
  while [ "$grew" = 1 ]; do
    grew=0
    for pair in $table; do
      case "$found" in *" ${pair%%:*} "*) continue;; esac
      case "$found" in *" ${pair##*:} "*) found="$found${pair%%:*} "; grew=1;; esac
    done
  done
  found=${found#" $leader "}
}
tree; [ -z "$found" ] || kill -TERM $found 2>/dev/null
turn=0
while [ "$turn" -lt "$2" ]; do tree; [ -n "$found" ] || break; sleep 0.1; turn=$((turn + 1)); done
turn=0
while tree; [ -n "$found" ] && [ "$turn" -lt 200 ]; do kill -KILL $found 2>/dev/null; turn=$((turn + 1)); done
kill -KILL "$leader"
rm -f "/polar/run/$1"
[ -z "$found" ]
"""
DRAIN_SECONDS = 2.0
_POLL_SECONDS = 0.1
_MOST_POLL_SECONDS = 1.0
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class Inside:
    """What to run, in which container, as whom."""

    container: Container
    command: str
    cwd: str
    env: Mapping[str, str]
    user: str
    restart: Callable[[], None]
    """The last resort that ends everything inside."""


def run(inside: Inside, *, limits: Limits, scratch: Path, log: Path | None) -> ExecResult:
    """Run to the end; see Runtime.exec."""
    started = time.monotonic()
    if limits.cancelled.is_set():
        return ExecResult(None, cancelled=True)
    if limits.left() == 0:
        return ExecResult(None, timed_out=True)
    _refuse_long_words(inside)
    mark = uuid.uuid4().hex
    with process.output_files(log or scratch / mark, keep=log is not None) as paths, faults("cannot start a command"):
        argv = [INIT, "-s", "--", "/bin/sh", "-c", WRAPPER, "polar", mark, inside.cwd, inside.command]
        with _Attached(inside.container, argv, inside.env, inside.user, paths) as attached:
            why = "interrupted"
            try:
                why = attached.wait(limits)
            finally:
                # Also when an exception comes through: a command must not outlive the wish for it.
                if why:
                    _end(inside, mark, attached)
        return ExecResult(
            exit_code=None if why else attached.exit_code(),
            stdout=process.read_kept(paths[0]),
            stderr=process.read_kept(paths[1]),
            timed_out=why == "timed_out",
            cancelled=why == "cancelled",
            seconds=time.monotonic() - started,
        )


def as_root(container: Container, script: str, *arguments: str) -> tuple[int | None, str]:
    """Run a script of ours inside, as root; its exit code and what it said."""
    done = container.exec_run(["/bin/sh", "-c", script, "polar", *arguments], user="0:0")
    return done.exit_code, done.output.decode(errors="replace").strip()


def _end(inside: Inside, mark: str, attached: _Attached) -> None:
    turns = str(int(process.GRACE_SECONDS / 0.1))
    with faults("cannot end a command"):
        try:
            code, _ = as_root(inside.container, END, mark, turns)
        except APIError:  # no process is left for it
            code = None
        if not attached.drained(DRAIN_SECONDS) or code != 0:
            inside.restart()
            attached.drained(DRAIN_SECONDS)


def _refuse_long_words(inside: Inside) -> None:
    words = [inside.command, *(f"{name}={value}" for name, value in inside.env.items())]
    if any(len(word.encode()) > LONGEST_WORD or "\0" in word for word in words):
        raise RuntimeFault(
            "cannot start a command: it or one of its variables is over 128 kB or has a NUL; put it into a file",
            retryable=False,
        )


class _Attached:
    """The stream of a started command, split into its two files as it comes."""

    def __init__(
        self, container: Container, argv: Sequence[str], env: Mapping[str, str], user: str, paths: Sequence[Path]
    ) -> None:
        self._api = client().api
        made = self._api.exec_create(container.id, list(argv), environment=dict(env), user=user)
        self._id = made["Id"]
        self._paths = paths
        self._pending = b""
        self._ended = False
        self._files = ExitStack()
        self._looked_at_size = time.monotonic()

    def __enter__(self) -> _Attached:
        outputs = [self._files.enter_context(process.opened(path)) for path in self._paths]
        self._outputs = {1: outputs[0], 2: outputs[1]}
        self._stream = self._api.exec_start(self._id, socket=True)
        self._files.callback(self._stream.close)
        self._socket: socket.socket = getattr(self._stream, "_sock", self._stream)
        self._pending = _read_ahead(self._stream, self._socket)
        self._split()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def wait(self, limits: Limits) -> str:
        """Until the command ends or a limit is hit; which limit, or an empty string."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        look, pause = time.monotonic() + _POLL_SECONDS, _POLL_SECONDS
        while not self._ended:
            left = limits.left()
            if ready.poll(1000 * (_POLL_SECONDS if left is None else min(_POLL_SECONDS, left))):
                self._receive()
            if limits.cancelled.is_set():
                return "cancelled"
            if limits.left() == 0:
                return "timed_out"
            if not self._ended and time.monotonic() >= look:
                # A daemon that it left may hold the stream open; ask, but seldom, for agents think for minutes.
                if not self._inspect()["Running"]:
                    self.drained(_POLL_SECONDS)
                    return ""
                pause = min(2 * pause, _MOST_POLL_SECONDS)
                look = time.monotonic() + pause
        return ""

    def drained(self, seconds: float) -> bool:
        """Take what still comes, for so long; whether the command has ended."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not self._ended and (left := deadline - time.monotonic()) > 0:
            if ready.poll(1000 * min(left, _POLL_SECONDS)):
                self._receive()
            elif not self._inspect()["Running"]:
                return True
        return self._ended or not self._inspect()["Running"]

    def exit_code(self) -> int:
        """Known a moment after the stream has ended."""
        deadline = time.monotonic() + 10
        while (found := self._inspect())["Running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        if found["ExitCode"] is None:
            raise RuntimeFault("the daemon does not know how a command ended")
        return int(found["ExitCode"])

    def _inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = self._api.exec_inspect(self._id)
        return found

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except ConnectionError:
            data = b""
        self._ended = not data
        self._pending += data
        self._split()

    def _split(self) -> None:
        """Frames are a kind, a length, and as many bytes; see the daemon's attach call."""
        view, at = memoryview(self._pending), 0
        while len(view) - at >= 8:
            size = int.from_bytes(view[at + 4 : at + 8], "big")
            if len(view) - at - 8 < size:
                break
            _write(self._outputs[view[at] or 1], view[at + 8 : at + 8 + size])
            at += 8 + size
        self._pending = bytes(view[at:])
        if time.monotonic() > self._looked_at_size + process.SIZE_CHECK_SECONDS:
            self._looked_at_size = time.monotonic()
            for path in self._paths:
                process.cut_on_disk(path)


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_ahead(stream: Any, connection: socket.socket) -> bytes:
    """What the HTTP client has read beyond the answer's head, which the bare socket would not give again."""
    buffered = getattr(getattr(getattr(stream, "_response", None), "raw", None), "_fp", None)
    reader = getattr(buffered, "fp", None)
    if reader is None:
        return b""
    connection.setblocking(False)
    try:
        found = reader.peek()
        return bytes(reader.read(len(found)) or b"") if found else b""
    finally:
        connection.setblocking(True)
