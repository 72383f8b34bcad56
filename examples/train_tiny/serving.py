"""A Polar of this example's own: the tiny engine on a copy of the checkpoint, and `polar up` with one lane on it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

from polar.client import Client

START_SECONDS = 300.0
LANE = "gpu0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class OwnPolar:
    """Engine and Polar as child processes; ends both."""

    def __init__(self, home: Path, checkpoint: Path, *, mode: str = "token", agents: int = 6) -> None:
        self.home = home.resolve()
        self.home.mkdir(parents=True, exist_ok=True)
        engine, api, proxy = free_port(), free_port(), free_port()
        self.engine_url, self.url = f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{api}"
        lane = {"name": LANE, "max_execute": agents, "ready_buffer": 2 * agents, "max_evaluate": agents}
        lane["engine"] = {"base_url": self.engine_url, "mode": mode, "parity_alarm": 1e-4}
        node = {"id": "local", "port": proxy, "lanes": [lane], "default_runtime": {"backend": "local"}}
        topology = {"rollout": {"host": "127.0.0.1", "port": api}, "gateway": {"nodes": [node]}}
        (self.home / "given.yaml").write_text(yaml.safe_dump(topology))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._serve = ["serve_engine", "--model", str(checkpoint), "--port", str(engine)]
        self._up = ["up", "-c", str(self.home / "given.yaml"), "--home", str(self.home), "--proxy-port", str(proxy)]

    def __enter__(self) -> Client:
        # Ended from outside, the block is left like any other, and nothing stays behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            for name, arguments in (("engine", self._serve), ("up", self._up)):
                with (self.home / f"{name}.log").open("ab") as log:
                    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "POLAR_HOME": str(self.home)}
                    argv = [sys.executable, "-m", "polar", *arguments]
                    self._processes.append(subprocess.Popen(argv, stdout=log, stderr=log, env=environ))
            return self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self) -> Client:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if any(process.poll() is not None for process in self._processes):
                break
            key = self.home / "api_key"
            client = Client(self.url, key.read_text().strip() if key.exists() else None)
            if client.ready():
                return client
            client.close()
            time.sleep(0.2)
        raise SystemExit(f"Polar did not start; see {self.home}/up.log and {self.home}/engine.log")

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
