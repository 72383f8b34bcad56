"""A sandbox without network tries everything that could lead out of it."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar import runtimes
from polar.runtimes.base import Limits, Runtime
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.spec import RuntimeSpec

reason = BubblewrapRuntime.unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")
TRY = """
import json, socket, sys
def tried(what):
    try:
        return "reached: %s" % (what(),)
    except OSError as error:
        return "refused: %s" % type(error).__name__
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(3)
        client.connect(address)
def told(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(1)
        client.sendto(b"hello", address)
        return client.recv(10)
asked = json.loads(sys.argv[1])
print(json.dumps({
    "node": tried(lambda: connect(socket.AF_INET, ("127.0.0.1", asked["port"]))),
    "node's address": tried(lambda: connect(socket.AF_INET, (asked["address"], asked["port"]))),
    "IPv6": tried(lambda: connect(socket.AF_INET6, ("::1", asked["port6"]))),
    "outside": tried(lambda: connect(socket.AF_INET, ("198.51.100.1", 80))),
    "outside by IPv6": tried(lambda: connect(socket.AF_INET6, ("2001:db8::1", 80))),
    "datagram": tried(lambda: told(socket.AF_INET, ("127.0.0.1", asked["udp"]))),
    "DNS": tried(lambda: socket.getaddrinfo("example.com", 80)),
    "DNS server": tried(lambda: told(socket.AF_INET, ("192.0.2.53", 53))),
    "abstract socket": tried(lambda: connect(socket.AF_UNIX, "\\0" + asked["name"])),
    "socket": tried(lambda: connect(socket.AF_UNIX, asked["socket"])),
    "other session": tried(lambda: connect(socket.AF_INET, ("127.0.0.1", asked["other"]))),
}))
"""


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[dict[str, int | str]]:
    """What listens on the node: TCP on every address, IPv6, a datagram socket, and both kinds of unix sockets."""
    name, path = f"polar-{uuid.uuid4().hex}", f"/tmp/polar-{uuid.uuid4().hex[:8]}.sock"
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        datagrams.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{name}")
        unix.bind(path)
        for each in (abstract, unix):
            each.listen()
        yield {
            "port": everywhere.getsockname()[1],
            "address": own_address(),
            "port6": six.getsockname()[1],
            "udp": datagrams.getsockname()[1],
            "name": name,
            "socket": path,
        }
    Path(path).unlink()


def own_address() -> str:
    """An address of this node that others may reach it by; no packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 80))
        except OSError:  # a machine without a route has no other than this
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def sandbox(folder: Path, **asked: object) -> Runtime:
    runtime = runtimes.create(RuntimeSpec(backend="bubblewrap", **asked), folder.name, folder)
    runtime.start(Limits(30))
    return runtime


def attempts(runtime: Runtime, asked: dict[str, int | str]) -> dict[str, str]:
    """What came of each attempt."""
    (runtime.workspace / "root").mkdir(exist_ok=True)
    done = runtime.exec(f"python - '{json.dumps(asked)}' <<'END'\n{TRY}\nEND", limits=Limits(60))
    assert done.ok, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_nothing_but_the_proxy_is_reached(tmp_path: Path, listeners: dict[str, int | str]) -> None:
    """Neither the node nor its sockets, no name, nobody outside, and not the way that another session has to its
    proxy. The proxy itself is reached."""
    ours, other = (sandbox(tmp_path / name, network="none") for name in ("ours", "other"))
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as theirs:
        inside = ours.reach(f"http://127.0.0.1:{proxy.getsockname()[1]}/")
        reach = other.reach(f"http://127.0.0.1:{theirs.getsockname()[1]}/")
        there = int(reach.rstrip("/").rpartition(":")[2])
        found = attempts(ours, {**listeners, "other": there})
        names = ours.exec("ls -R /polar /tmp /run 2>/dev/null", limits=Limits(20)).stdout
        own = {**listeners, "other": int(inside.rstrip("/").rpartition(":")[2])}
        assert attempts(ours, own)["other session"].startswith("reached")
    for runtime in (ours, other):
        runtime.destroy()
    assert {name: said for name, said in found.items() if not said.startswith("refused")} == {}
    assert len(found) == 11
    assert str(listeners["socket"]).rpartition("/")[2] not in names


def test_the_attempts_can_succeed(tmp_path: Path, listeners: dict[str, int | str]) -> None:
    """With the node's network the same attempts reach the node: what the test before this sees refused is refused by
    the sandbox."""
    runtime = sandbox(tmp_path / "open", network="host")
    found = attempts(runtime, {**listeners, "other": listeners["port"]})
    runtime.destroy()
    for name in ("node", "node's address", "IPv6", "abstract socket", "other session"):
        assert found[name].startswith("reached"), (name, found)
