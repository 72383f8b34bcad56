"""A judge behind real HTTP: the scripted engine as its own process, answering what a test says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from polar.embedded import free_port


@contextmanager
def judge(answers: list[dict[str, Any]], folder: Path) -> Iterator[str]:
    """Its base URL. Of several answers, each question of a conversation gets the next."""
    script = folder / "judge.json"
    script.write_text(json.dumps({"scripts": [{"answers": answers}]}))
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port), "--name", "judge"]
    with (folder / "judge.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert process.poll() is None, (folder / "judge.log").read_text()
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)
