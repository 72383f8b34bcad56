"""The proxy's address lent to a network namespace that has no other way out.

A listening socket belongs to the network it was made in, whoever holds it. So a thread of the worker goes into
the container's network, listens on its loopback, and what is accepted there is joined, from outside, to the one
address that was asked for. Nothing runs inside and nothing is mounted; a worker that dies takes its sockets along.
It needs the right to enter the namespace: root on the machine of the container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from polar.errors import RuntimeFault
from polar.runtimes import forward
from polar.runtimes.reach import Address, Reached

CLONE_NEWNET = 0x40000000
HELP = "a worker lends a container the proxy only as root on the container's machine"


class Relays:
    """The listeners for what one runtime may reach: there while at least one command runs."""

    def __init__(self) -> None:
        self.reached = Reached()
        self._lock = threading.Lock()
        self._users = 0
        self._pid = 0
        self._open: dict[int, ExitStack] = {}

    @contextmanager
    def open(self, process: Callable[[], int]) -> Iterator[None]:
        """While inside, the ports are there; `process` names one that is in the network."""
        with self._lock:
            if ports := self.reached.ports():
                self._listen(process(), ports)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._close()

    def _listen(self, pid: int, ports: dict[int, Address]) -> None:
        if pid != self._pid:
            # The container was restarted: its old network is gone, and these listeners with it.
            self._close()
        self._pid = pid
        for port in ports.keys() - self._open.keys():
            with ExitStack() as opened:
                opened.enter_context(forward.serving(listener(pid, port), ports[port]))
                self._open[port] = opened.pop_all()

    def _close(self) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()


def require_own(pid: int, container_id: str) -> None:
    """Whether `pid` is a process of that container on this machine, and not a number of another one's."""
    try:
        own = container_id in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        own = False
    if pid <= 0 or not own:
        raise RuntimeFault(
            f"the container's processes are not seen from here: {HELP}; or name a network of the daemon's that only "
            "the proxy is in",
            retryable=False,
        )


def listener(pid: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 in the network of process `pid`. Raises RuntimeFault."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def listen() -> None:
        try:
            descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            made.append(socket.create_server(("127.0.0.1", port), backlog=128))
        except OSError as error:
            failed.append(error)

    # The namespace is the thread's own, and goes with it: no other thread of the worker is moved.
    thread = threading.Thread(target=listen, name="namespace")
    thread.start()
    thread.join()
    if failed:
        raise RuntimeFault(f"cannot listen on port {port} of the container ({failed[0]}): {HELP}", retryable=False)
    return made[0]
