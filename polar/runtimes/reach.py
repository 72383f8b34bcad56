"""Which addresses of the node a sandbox without network may reach, and the ports inside that stand for them."""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

from polar.errors import RuntimeFault

Address = tuple[str, int]


class Reached:
    """Port inside → address outside; each address once."""

    def __init__(self) -> None:
        self._ports: dict[int, Address] = {}
        self._lock = threading.Lock()

    def reach(self, url: str) -> str:
        """The address inside that stands for `url`. Raises RuntimeFault."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise RuntimeFault(f"a sandbox without network can reach plain http addresses, not {url}", retryable=False)
        address = (parts.hostname, parts.port or 80)
        port = address[1] if address[1] >= 1024 else address[1] + 20_000
        with self._lock:
            while self._ports.get(port, address) != address:
                port += 1
            self._ports[port] = address
        return f"http://127.0.0.1:{port}{parts.path}"

    def ports(self) -> dict[int, Address]:
        """All that was asked for so far."""
        with self._lock:
            return dict(sorted(self._ports.items()))
