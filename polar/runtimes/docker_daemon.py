"""Talking to the Docker daemon: one client per process, its errors as RuntimeFault, and images fetched once per node.

The daemon is the one that DOCKER_HOST names, or the machine's own. What is done with containers is docker.py's.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from docker.client import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.images import Image
from docker.utils import parse_repository_tag
from requests.exceptions import RequestException

from polar.errors import RuntimeFault
from polar.log import line
from polar.runtimes.base import Limits

logger = logging.getLogger(__name__)
API_SECONDS = 120
"""For one answer of the daemon; pulls stream theirs."""
CONNECTIONS = 64
PROGRESS_SECONDS = 5.0
_pulling: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


@functools.cache
def client() -> DockerClient:
    """The process's client. Raises DockerException while there is no daemon."""
    return DockerClient.from_env(timeout=API_SECONDS, max_pool_size=CONNECTIONS)


def unavailable() -> str | None:
    """Why there is no daemon to talk to, with what to do."""
    try:
        client().ping()
    except (DockerException, RequestException) as error:
        first = str(error).splitlines()[0]
        return f"no Docker daemon answers ({first}): start dockerd, or set DOCKER_HOST (docs/runtimes.md says how)"
    return None


@contextmanager
def faults(doing: str) -> Iterator[None]:
    """What the daemon says against it, as a RuntimeFault. A daemon that is away or broken is worth another try."""
    try:
        yield
    except APIError as error:
        said = error.explanation or str(error)
        raise RuntimeFault(f"{doing}: {said}", retryable=error.is_server_error() and not _hopeless(said)) from error
    except (DockerException, RequestException) as error:
        raise RuntimeFault(f"{doing}: {error}") from error


def fetch(name: str, limits: Limits, log: Path) -> Image:
    """The image of that name, pulled if it is not here; sessions that want the same one wait for the first."""
    with faults(f"cannot get image {name}"):
        with _pulling[name]:
            try:
                return client().images.get(name)
            except ImageNotFound:
                _pull(name, limits, log)
        return client().images.get(name)


def _pull(name: str, limits: Limits, log: Path) -> None:
    started = said = time.monotonic()
    layers: dict[str, tuple[int, int]] = {}
    repository, tag = parse_repository_tag(name)
    logger.info(line("image pull", image=name))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        for step in client().api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            if "error" in step:
                raise RuntimeFault(f"cannot pull image {name}: {step['error']}; check name and login")
            if limits.cancelled.is_set() or limits.left() == 0:
                raise RuntimeFault(f"image {name} was not pulled in the session's time: pull it on the node beforehand")
            detail = step.get("progressDetail") or {}
            if detail.get("total"):
                layers[step["id"]] = (detail.get("current", 0), detail["total"])
            elif step.get("status"):
                file.write(f"{step.get('id', '')} {step['status']}\n")
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                done, total = (sum(column) >> 20 for column in zip(*layers.values(), strict=True)) if layers else (0, 0)
                logger.info(line("image pull", image=name, mib=done, of=total))
    logger.info(line("image pulled", image=name, seconds=f"{time.monotonic() - started:.1f}"))


def _hopeless(said: str) -> bool:
    """Words of a daemon's 500 that the next try would hear again."""
    return any(words in said for words in ("storage-opt", "device driver", "executable file not found"))
