"""Nodes with addresses of their own on one machine: network namespaces, joined by a bridge that a test may cut.

What runs on the nodes is `scene.py`'s affair.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field


def ip(*words: str) -> str:
    """Run `ip`; what it prints."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def impossible() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    if not shutil.which("ip"):
        return "needs the program `ip` (Debian's iproute2)"
    name = f"polar-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "exec", name, "true")
        ip("link", "add", f"pt{os.getpid()}", "type", "bridge")
        ip("link", "del", f"pt{os.getpid()}")
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@dataclass
class Network:
    """A bridge with this machine at one end and a namespace for each node at the others."""

    tag: str = field(default_factory=lambda: f"plr{os.getpid()}")
    places: list[str] = field(default_factory=list)
    """Names of nodes, in the order of their addresses."""
    prefix: str = ""

    def open(self) -> None:
        """Make the bridge, on a range of addresses that nobody here uses."""
        used = ip("-o", "-4", "addr") + ip("-4", "route")
        self.prefix = next(each for n in range(250) if (each := f"10.213.{(os.getpid() + n) % 250}.") not in used)
        ip("link", "add", self.tag, "type", "bridge")
        ip("addr", "add", f"{self.prefix}1/24", "dev", self.tag)
        ip("link", "set", self.tag, "up")

    @property
    def center(self) -> str:
        """This machine's address as the nodes see it."""
        return f"{self.prefix}1"

    def address(self, name: str) -> str:
        """A node's own."""
        return f"{self.prefix}{11 + self.places.index(name)}"

    def add(self, name: str) -> None:
        """A namespace for a node, on the bridge."""
        self.places.append(name)
        space, wire = self._space(name), self._wire(name)
        ip("netns", "add", space)
        ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", wire, "master", self.tag, "up")
        for words in (
            ("addr", "add", f"{self.address(name)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", space, *words)

    def inside(self, name: str) -> tuple[str, ...]:
        """What a command line begins with to run on a node."""
        return ("ip", "netns", "exec", self._space(name))

    def cut(self, name: str) -> None:
        """From now on nothing gets through, and nobody is told."""
        ip("link", "set", self._wire(name), "down")

    def heal(self, name: str) -> None:
        """The line is back."""
        ip("link", "set", self._wire(name), "up")

    def close(self) -> None:
        """Remove everything; the wires go with their namespaces."""
        for name in self.places:
            ip("netns", "del", self._space(name))
        ip("link", "del", self.tag)

    def _space(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def _wire(self, name: str) -> str:
        return f"{self.tag}{name}"  # the kernel takes 15 characters
