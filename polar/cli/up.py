"""`polar up`: everything on this machine. Embeds a Postgres and a broker unless the settings name real ones.

What is embedded lives in the home folder and is found again at the next start: work that was unfinished
goes on. Supervision itself is `polar.embedded`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console

import migrations
from polar import keys, log
from polar.cli import services
from polar.cli.dashboard import login_link
from polar.db import connect, transaction
from polar.embedded import (
    EmbeddedBroker,
    EmbeddedError,
    EmbeddedPostgres,
    Service,
    Supervisor,
    folder_lock,
    free_port,
    require_free_port,
)
from polar.embedded.files import write_private
from polar.settings import Settings
from polar.spec import RuntimeSpec
from polar.topology import EngineSpec, GatewaySpec, LaneSpec, NodeSpec, RolloutSpec, Topology, load_topology, shown_url

BROKER_URL = "broker_url"
"""File of the home folder that says where the embedded broker is: for `polar flower`, which is no part of `up`."""
ENGINE_PORT = 8199
"""Where the tiny engine listens if nobody else does; the scripted one prefers the next port."""
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Plan:
    """What will run: settings and topology as every process will see them."""

    settings: Settings
    topology: Topology
    engines: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """(service name, url, arguments) of the engines that are embedded."""

    @property
    def node(self) -> NodeSpec:
        return self.topology.node(self.settings.node_id)

    @property
    def url(self) -> str:
        return f"http://{services.local(self.settings.host)}:{self.settings.port}"


def make_plan(settings: Settings, topology_path: Path | None, script: Path | None) -> Plan:
    """Settings and topology for this machine; without a topology, the tiny engine on lane gpu0."""
    home = settings.home_path
    settings = replace(settings, home=str(home))
    path = topology_path or (Path(settings.topology) if settings.topology else None)
    engines: list[tuple[str, str, tuple[str, ...]]] = []
    if path is not None:
        topology = load_topology(path)
        names = [node.id for node in topology.gateway.nodes]
        node_id = settings.node_id if settings.node_id in names or len(names) != 1 else names[0]
        settings = replace(settings, host=topology.rollout.host, port=topology.rollout.port, node_id=node_id)
    else:
        url = engine_url(ENGINE_PORT)
        engines.append(("engine", url, ()))
        lanes = [LaneSpec(name="gpu0", engine=EngineSpec(base_url=url), max_execute=4, ready_buffer=4)]
        if script is not None:
            url = engine_url(ENGINE_PORT + 1)
            engines.append(("scripted-engine", url, ("--script", str(script.resolve()))))
            lanes.append(LaneSpec(name="scripted", engine=EngineSpec(base_url=url), max_execute=8, ready_buffer=8))
        node = NodeSpec(
            id=settings.node_id,
            host=settings.host,
            port=settings.proxy_port,
            lanes=tuple(lanes),
            default_runtime=RuntimeSpec(backend="local"),
        )
        rollout = RolloutSpec(host=settings.host, port=settings.port)
        topology = Topology(rollout=rollout, gateway=GatewaySpec(nodes=(node,)))
    effective = home / "topology.yaml"
    home.mkdir(parents=True, exist_ok=True)
    effective.write_text(yaml.safe_dump(topology.model_dump(mode="json"), sort_keys=False))
    pages = settings.pages_secret or services.secret_file(home / "pages_secret")
    signing = settings.webhook_secret or services.secret_file(home / "webhook_secret")
    settings = replace(settings, topology=str(effective), webhook_secret=signing, pages_secret=pages)
    return Plan(settings, topology, tuple(engines))


def engine_url(port: int) -> str:
    """This port if it is free, else another: nobody but the lane has to know an embedded engine's address."""
    try:
        require_free_port(port, "an engine")
    except EmbeddedError:
        port = free_port()
    return f"http://127.0.0.1:{port}"


def polar_services(plan: Plan) -> list[Service]:
    """Polar's own processes, in the order in which they start."""
    settings, node = plan.settings, plan.node
    embedded = [services.engine(settings, name, url, *arguments) for name, url, arguments in plan.engines]
    lanes = [lane.name for lane in node.lanes]
    together = [
        services.api(settings),
        services.proxy(settings, node),
        services.lane_worker(settings, lanes),
        *embedded,
        services.beat(settings),
    ]
    # They do not need each other to start, and most of a start is importing: all at once, then wait for all.
    probes = [each.ready for each in together if each.ready is not None]
    probes.append(services.answers(f"{plan.url}/readyz"))
    started = [replace(each, ready=None) for each in together]
    started[-1] = replace(started[-1], ready=lambda: all(probe() for probe in probes), ready_seconds=90.0)
    return started


def prepare_database(settings: Settings) -> str:
    """Migrate, and register the API key that is kept in the home folder; that key."""
    migrations.upgrade(settings.database_url)
    key = services.secret_file(settings.home_path / "api_key", keys.PREFIX)
    database = connect(settings.database_url, pool_size=1)
    with transaction(database) as db:
        keys.ensure(db, "polar up", key)
    database.dispose()
    return key


def run(plan: Plan, on_ready: Callable[[Plan, str], None]) -> None:
    """Start everything, call `on_ready(plan, api key)`, and stay until a signal comes."""
    settings = plan.settings
    for wanted, port in (("the API", settings.port), ("the proxy", plan.node.port)):
        require_free_port(port, wanted)
    with folder_lock(settings.home_path):
        postgres = None if settings.database_url else EmbeddedPostgres(settings.home_path / "postgres")
        broker = None if settings.broker_url else EmbeddedBroker(settings.home_path / "broker")
        if postgres is not None:
            settings = replace(settings, database_url=postgres.url)
        if broker is not None:
            settings = replace(settings, broker_url=broker.url)
            write_private(settings.home_path / BROKER_URL, broker.url)
        plan = replace(plan, settings=settings)
        servers = [server.service() for server in (postgres, broker) if server is not None]
        key = ""

        def migrate() -> None:
            nonlocal key
            key = prepare_database(settings)

        first, *others = polar_services(plan)
        # The first of Polar's own services starts once the servers are ready: that is the moment to migrate.
        own = [replace(first, before=migrate), *others]
        Supervisor([*servers, *own]).run_forever(on_ready=lambda: on_ready(plan, key))


def greet(plan: Plan, key: str) -> None:
    """Say where everything is and what to do next."""
    lanes = ", ".join(f"{lane.name} → {shown_url(lane.engine.base_url)}" for lane in plan.node.lanes)
    console.print("\n[bold]Polar is up.[/bold]  Ctrl-C stops all of it; started again it carries on.\n")
    for name, value in (
        ("pages", login_link(plan.url, key)),
        ("API", plan.url),
        ("API key", key),
        ("proxy", plan.node.url),
        ("lanes", lanes),
        ("logs", str(plan.settings.home_path / "logs")),
    ):
        console.print(f"  {name:<9}{value}", soft_wrap=True)
    console.print("\n  next     polar submit examples/tool_lookup/task.yaml\n")


@click.command(epilog="Example: polar up --home /data/polar --port 9000")
@click.option(
    "-c",
    "--config",
    "topology",
    type=click.Path(exists=True, path_type=Path),
    help="topology.yaml; without it: lane gpu0 on the tiny engine.",
)
@click.option("--home", help="Folder for data and logs.  [default: .polar]")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port of the API.  [default: 8080]")
@click.option("--proxy-port", type=int, help="Port of the proxy.  [default: 8100]")
@click.option(
    "--script", type=click.Path(exists=True, path_type=Path), help="Add a lane 'scripted' that replays this file."
)
@click.option("--open", "open_", is_flag=True, help="Take requests without an API key.")
def up(
    topology: Path | None,
    home: str | None,
    host: str | None,
    port: int | None,
    proxy_port: int | None,
    script: Path | None,
    open_: bool,
) -> None:
    """Start all of Polar on this machine, until Ctrl-C.

    Embeds Postgres and a Redis-compatible broker in the home folder, unless POLAR_DATABASE_URL and
    POLAR_BROKER_URL name real servers."""
    given: dict[str, Any] = {
        "home": home,
        "host": host,
        "port": port,
        "proxy_port": proxy_port,
        "auth": "open" if open_ else None,
    }
    settings = replace(Settings.load(), **{name: value for name, value in given.items() if value is not None})
    log.configure(settings.log_level, settings.log_format)
    console.print("starting …")
    run(make_plan(settings, topology, script), greet)
