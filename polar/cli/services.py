"""The services of a machine: how each process of Polar is started, as one list for `up` and `serve_*`.

The commands are the ones at the top of the files in `workers/`; supervision is `polar.embedded`'s.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from polar.embedded import EmbeddedPostgres, Service
from polar.settings import Settings, child_environ
from polar.topology import NodeSpec

GUNICORN = (
    sys.executable,
    "-m",
    "gunicorn",
    "--no-control-socket",
    "--log-level",
    "warning",
    "--graceful-timeout",
    "5",
)
CELERY = (sys.executable, "-m", "celery", "-A", "polar", "worker", "--without-gossip", "--without-mingle")


def secret_file(path: Path, prefix: str = "") -> str:
    """The secret kept in this file, made on first use, readable by its owner only."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(prefix + secrets.token_urlsafe(32))
    return path.read_text().strip()


def answers(url: str) -> Callable[[], bool]:
    """Whether something answers there, whatever it answers."""

    def ask() -> bool:
        try:
            return httpx.get(url, timeout=1.0).status_code < 500
        except httpx.HTTPError:
            return False

    return ask


def service(name: str, argv: tuple[str, ...], settings: Settings, ready: Callable[[], bool] | None = None) -> Service:
    """One process of Polar with its log under the home folder."""
    log = settings.home_path / "logs" / f"{name}.log"
    env = child_environ(settings, OPENBLAS_NUM_THREADS="1")
    return Service(name=name, argv=argv, env=env, log_path=log, ready=ready, grace_seconds=12.0)


def api(settings: Settings) -> Service:
    """The REST API and the pages."""
    bind = f"{settings.host}:{settings.port}"
    threads = ("-k", "workers.serving.patience.Worker", "--threads", str(settings.api_threads))
    argv = (*GUNICORN, "workers.api:app", *threads, "-b", bind)
    return service("api", argv, settings, answers(f"http://{local(settings.host)}:{settings.port}/healthz"))


def proxy(settings: Settings, node: NodeSpec) -> Service:
    """The node's proxy."""
    bind = f"{node.host}:{node.port}"
    processes = ("-w", str(settings.proxy_processes))
    argv = (*GUNICORN, "workers.proxy:app", "-k", "uvicorn_worker.UvicornWorker", *processes, "-b", bind)
    return service("proxy", argv, settings, answers(f"http://{local(node.host)}:{node.port}/health"))


def lane_worker(settings: Settings, lanes: list[str]) -> Service:
    """A worker that serves these lanes whole."""
    argv = (*CELERY, "-n", f"{settings.node_id}@%h", "-Q", ",".join(lanes), "-l", "WARNING")
    return service("worker", argv, settings)


def beat(settings: Settings) -> Service:
    """The sweeper's clock and its own small worker."""
    argv = (*CELERY, "-n", "beat@%h", "-Q", "sweep", "-B", "-c", "4", "-l", "WARNING")
    return service("beat", argv, settings)


def engine(settings: Settings, name: str, url: str, *arguments: str) -> Service:
    """A tiny engine, or its scripted twin, at `url`."""
    port = url.rpartition(":")[2]
    argv = (sys.executable, "-m", "workers.engine", "--port", port, *arguments)
    return service(name, argv, settings, answers(f"{url}/health"))


def local(host: str) -> str:
    """An address at which this machine finds a server that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def database_url(settings: Settings) -> str:
    """The database of the settings, or the one that `polar up` embeds while it runs; empty if there is none."""
    if settings.database_url:
        return settings.database_url
    data = settings.home_path / "postgres"
    try:
        # Postgres notes there which port it listens on; a server that is down leaves no such file.
        port = int((data / "postmaster.pid").read_text().splitlines()[3])
    except (OSError, IndexError, ValueError):
        return ""
    return EmbeddedPostgres(data, port).url
