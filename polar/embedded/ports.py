"""Loopback ports: find a free one, or say clearly that a wanted one is taken.

Leaves to others: which service wants which port, and binding it. Between the answer here and the bind there, another
program may still take the port; the server's own log then names it.
"""

from __future__ import annotations

import socket

from polar.embedded.errors import EmbeddedError

HOST = "127.0.0.1"

_handed_out: set[int] = set()


def free_port() -> int:
    """Return a loopback port that is free now and that this process has not handed out before."""
    for _ in range(100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in _handed_out:
            _handed_out.add(port)
            return port
    raise EmbeddedError(f"found no free port on {HOST}; name one, or close programs that listen there")


def require_free_port(port: int, wanted_for: str) -> None:
    """Raise EmbeddedError when nothing could listen on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # The servers set this too: without it a port would look taken for a minute after a restart (TIME_WAIT).
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EmbeddedError(
                f"port {port} on {HOST}, wanted for {wanted_for}, cannot be used ({error.strerror}); "
                f"stop the program that holds it, or choose another port for {wanted_for}"
            ) from error
