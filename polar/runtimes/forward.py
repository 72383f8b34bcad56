"""The way out of a sandbox without network: a port inside, a Unix socket between, one address outside.

Stdlib only and importing nothing of Polar, because its inner half runs inside the sandbox as a program:

    python forward.py PORT=SOCKET [PORT=SOCKET ...] -- COMMAND [ARGUMENT ...]

listens on 127.0.0.1 PORT, hands each connection to SOCKET, runs COMMAND and ends with its exit code. The outer
half, `relaying`, listens on the socket and connects on to the one address it was given. Bytes are not looked at.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

CHUNK = 65536
Connect = Callable[[], socket.socket]


@contextlib.contextmanager
def relaying(folder: str, name: str, address: tuple[str, int]) -> Iterator[None]:
    """Listen on the socket `name` in `folder` and relay to `address`, until the block ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A socket's path has room for 107 bytes, a workspace's often has more: name the folder by its number.
        listener.bind(f"/proc/self/fd/{descriptor}/{name}")
        listener.listen(128)
        with serving(listener, address):
            yield
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def serving(listener: socket.socket, address: tuple[str, int]) -> Iterator[None]:
    """Relay what `listener` accepts to `address`, until the block ends."""
    try:
        _serve(listener, lambda: socket.create_connection(address, timeout=30))
        yield
    finally:
        # Closing alone would leave the accepting thread asleep.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _serve(listener: socket.socket, connect: Connect) -> None:
    threading.Thread(target=_accept, args=(listener, connect), daemon=True).start()


def _accept(listener: socket.socket, connect: Connect) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:  # the listener was closed
            return
        threading.Thread(target=_join, args=(near, connect), daemon=True).start()


def _join(near: socket.socket, connect: Connect) -> None:
    """Carry bytes both ways until both sides are done."""
    with near:
        try:
            far = connect()
        except OSError:  # closing `near` says all there is to say to a client
            return
        with far:
            far.settimeout(None)
            back = threading.Thread(target=_pump, args=(far, near), daemon=True)
            back.start()
            _pump(near, far)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK):
            target.sendall(data)
        # One side has said all it has to say; the other may still be answering.
        target.shutdown(socket.SHUT_WR)
    except OSError:  # reset by one side: the other must learn of it, too
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def main(arguments: list[str]) -> int:
    """The inner half: listen, run the command, give its exit code."""
    split = arguments.index("--")
    for pair in arguments[:split]:
        port, _, path = pair.partition("=")
        # Shared, because commands that run in one network at the same time each bring a forwarder of their own.
        listener = socket.create_server(("127.0.0.1", int(port)), backlog=128, reuse_port=True)
        _serve(listener, lambda path=path: _unix(path))  # type: ignore[misc]
    returned = subprocess.call(arguments[split + 1 :])
    return returned if returned >= 0 else 128 - returned


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
