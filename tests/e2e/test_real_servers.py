"""`polar up` on servers that somebody else runs: it embeds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from polar.embedded import free_port

pytestmark = pytest.mark.e2e


def test_named_servers_are_used_and_nothing_is_embedded(database_url: str, broker_url: str, tmp_path: Path) -> None:
    """With both URLs set, Polar comes up, a lane is alive, and no server's data lies in the home folder."""
    home, port = tmp_path / "home", free_port()
    env = {**os.environ, "POLAR_DATABASE_URL": database_url, "POLAR_BROKER_URL": broker_url}
    flags = ["--home", str(home), "--port", str(port), "--proxy-port", str(free_port())]
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "polar", "up", *flags], env=env, stdout=log, stderr=log)
    try:
        end, ready = time.monotonic() + 90, False
        while not ready:
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "up.log").read_text()
            time.sleep(0.2)
            try:
                ready = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).is_success
            except httpx.TransportError:
                continue
        assert not [path for path in home.iterdir() if path.name.startswith(("postgres", "broker"))]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 0
