"""`polar doctor`: looks at everything a rollout needs, and says what is wrong and what to do."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import httpx
import redis
from rich.console import Console
from rich.markup import escape
from sqlalchemy.exc import SQLAlchemyError

from polar.cli import services
from polar.cli.checks import Check, checks, lacking
from polar.db import connect
from polar.errors import EngineError, PolarError
from polar.registry import load
from polar.renderers import for_folder
from polar.renderers.selftest import self_test
from polar.runtimes import RUNTIMES
from polar.runtimes.base import Runtime
from polar.settings import Settings
from polar.stages import orphans
from polar.stages.fitness import engine_class, probed
from polar.topology import LaneSpec, Topology, load_topology

console = Console(highlight=False)
DISK_BYTES, DISK_PART = 2 << 30, 0.03
"""Less than either, and the disk is nearly full."""
OTHER_RENDERER = "name another as the lane's renderer, or set mode: canonical (docs/howto/own_engine.md)"


def machine(settings: Settings) -> Iterator[Check]:
    """Python, the home folder and the runtimes of this machine."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", version, None if sys.version_info >= (3, 11) else "Polar needs Python 3.11 or newer")
    try:
        settings.home_path.mkdir(parents=True, exist_ok=True)
        probe = settings.home_path / ".probe"
        probe.write_text("")
        probe.unlink()
        yield Check("home folder", str(settings.home_path))
    except OSError as error:
        yield Check("home folder", f"{settings.home_path}: {error.strerror}", "set POLAR_HOME to a writable folder")
    else:
        yield disk(settings.home_path)
    for name in RUNTIMES:
        reason = load("runtime", RUNTIMES, name, Runtime).unavailable()  # type: ignore[type-abstract]
        # A runtime that this machine lacks hurts only tasks that ask for it, so it is told, and nothing has to be done.
        yield Check(f"runtime {name}", reason or "ready")


def orphaned(settings: Settings) -> Iterator[Check]:
    """Sandboxes that dead workers left here and no session names: they are removed."""
    if not settings.database_url:
        return
    try:
        gone = orphans.sweep(connect(settings.database_url, pool_size=1), settings, settings.node_id)
    except SQLAlchemyError:  # said by the look at the servers
        return
    yield Check("orphans", f"removed {gone}" if gone else "none")


def disk(folder: Path) -> Check:
    """Whether the disk of this folder has room: a full one stops workspaces, logs and an embedded Postgres."""
    found = shutil.disk_usage(folder)
    told = f"{found.free / 2**30:.1f} of {found.total / 2**30:.1f} GiB are free"
    if found.free >= DISK_BYTES and found.free >= DISK_PART * found.total:
        return Check("disk", told)
    return Check("disk", f"{told} at {folder}", "make room, or set POLAR_HOME to a larger disk")


def servers(settings: Settings) -> Iterator[Check]:
    """Postgres and broker, and what Postgres knows of the fleet."""
    url = services.database_url(settings)
    if url:
        yield from checks(url, settings)
    else:
        yield Check("postgres", "POLAR_DATABASE_URL is not set, and none is embedded yet: `polar up` embeds one")
    if settings.broker_url:
        try:
            redis.Redis.from_url(settings.broker_url, socket_timeout=2).ping()
            yield Check("broker", "answers")
        except redis.RedisError as error:
            yield Check("broker", str(error), "check POLAR_BROKER_URL and that the server runs")
    else:
        yield Check("broker", "POLAR_BROKER_URL is not set: `polar up` embeds one")


def addresses(settings: Settings, config: Path | None) -> Iterator[Check]:
    """Everything the topology names: API, proxies, engines."""
    effective = settings.home_path / "topology.yaml"
    path = config or (Path(settings.topology) if settings.topology else effective)
    if not path.exists():
        yield Check("topology", "none yet: `polar up` makes one")
        return
    try:
        topology = load_topology(path)
    except PolarError as error:
        yield Check("topology", error.message, f"mend {path}; every key: docs/reference/topology.md")
        return
    yield Check("topology", str(path))
    yield from _default_runtimes(topology)
    yield _ask("api", f"{topology.rollout.url}/readyz", "start it: polar up")
    for node in topology.gateway.nodes:
        yield _ask(f"proxy of {node.id}", f"{node.url}/health", "start it: polar serve_gateway")
        for lane in node.lanes:
            yield _probe(lane)
            if lane.engine.tokenizer and Path(lane.engine.tokenizer).is_dir():
                yield _renderer(lane)


def _default_runtimes(topology: Topology) -> Iterator[Check]:
    """The runtimes that nodes fall back on, where this machine lacks them."""
    for node in topology.gateway.nodes:
        if node.default_runtime is not None and (reason := lacking(node.default_runtime.name)) is not None:
            told = f"its default_runtime is {node.default_runtime.name}: {reason}"
            yield Check(f"runtime of {node.id}", told, "mend that on the node, or give it another default_runtime")


def _probe(lane: LaneSpec) -> Check:
    """The lane's engine, tried as the lane itself tries it."""
    name = f"engine of {lane.name}"
    try:
        found = asyncio.run(probed(lane.engine))
    except EngineError as error:
        return Check(name, error.message, "start the engine, or mend base_url")
    told = [
        f"{found['engine']} {found['version'] or ''}".strip(),
        f"model {found['model']}",
        f"{found['mode']} mode",
        "scripted answers" if found["scripted"] else f"{found['logprobs']} log-probabilities",
        "" if found["ids_out"] else "no token ids, so nothing of it can be trained on",
        f"context {found['context_length']}" if found["context_length"] else "context not told",
        "" if found["weight_versions"] or found["scripted"] else "does not say which weights sampled",
    ]
    do = None
    if found["logprobs"] in ("raw", "none") and not found["scripted"] and lane.engine.mode == "token":
        told.append("of no use for training")
        do = engine_class(lane.engine).PROCESSED_BY
    elif not found["ids_out"] and lane.engine.mode != "canonical":
        do = (
            "serve the model with an engine that returns token ids (docs/engines.md), or set the lane's mode: canonical"
        )
    return Check(name, ", ".join(part for part in told if part), do)


def _renderer(lane: LaneSpec) -> Check:
    """What a lane prints its prompts with, tried; a lane without a tokenizer of its own asks its engine later."""
    engine = lane.engine
    try:
        renderer = for_folder(Path(engine.tokenizer or ""), engine.renderer, engine.model)
    except PolarError as error:
        return Check(f"renderer of {lane.name}", error.message, OTHER_RENDERER)
    found = self_test(renderer)
    told = f"{renderer.name}: {found.summary()}"
    return Check(f"renderer of {lane.name}", told, None if found.difference is None else OTHER_RENDERER)


def _ask(name: str, url: str, hint: str) -> Check:
    try:
        response = httpx.get(url, timeout=5.0)
    except httpx.HTTPError as error:
        return Check(name, f"{url} does not answer ({type(error).__name__})", hint)
    return Check(name, f"{url} answered {response.status_code}", None if response.is_success else hint)


@click.command(epilog="Example: polar doctor -c topology.yaml")
@click.option("-c", "--config", type=click.Path(exists=True, path_type=Path), help="topology.yaml to check.")
def doctor(config: Path | None) -> None:
    """Check this machine, the servers and the engines; exit code 1 if something is wrong."""
    settings = Settings.load()
    looks: tuple[Callable[[], Iterator[Check]], ...] = (
        lambda: machine(settings),
        lambda: servers(settings),
        lambda: orphaned(settings),
        lambda: addresses(settings, config),
    )
    well = True
    for look in looks:
        for name, found, do in look():
            well = well and do is None
            mark = "[green]ok[/green]  " if do is None else "[red]bad[/red] "
            told = found if do is None else f"{found}; {do}"
            console.print(f"{mark} {name:<20} {escape(told)}", soft_wrap=True)
    raise SystemExit(0 if well else 1)
