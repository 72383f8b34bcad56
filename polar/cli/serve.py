"""`serve_rollout`, `serve_gateway`, `serve_engine`: one part of Polar each, with the original's names and flags.

They need real servers (POLAR_DATABASE_URL, POLAR_BROKER_URL); `polar up` is the command that embeds them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from polar import log
from polar.cli import services
from polar.cli.up import console, prepare_database
from polar.embedded import Supervisor
from polar.errors import SpecError
from polar.settings import Settings
from polar.topology import load_topology


def _settings(config: Path) -> Settings:
    settings = Settings.load()
    for name in ("database_url", "broker_url"):
        if not getattr(settings, name):
            raise SpecError.at(f"POLAR_{name.upper()}", "is not set; name a real server, or use `polar up`")
    log.configure(settings.log_level, settings.log_format)
    return replace(settings, topology=str(config.resolve()))


CONFIG = click.option(
    "-c", "--config", required=True, type=click.Path(exists=True, path_type=Path), help="topology.yaml"
)


@click.command("serve_rollout", epilog="Example: polar serve_rollout -c topology.yaml")
@CONFIG
def serve_rollout(config: Path) -> None:
    """Serve the REST API, the pages and the sweeper's clock."""
    settings = _settings(config)
    topology = load_topology(config)
    settings = replace(settings, host=topology.rollout.host, port=topology.rollout.port)
    secret = settings.pages_secret or services.secret_file(settings.home_path / "pages_secret")
    settings = replace(settings, pages_secret=secret)
    key = prepare_database(settings)
    ready = lambda: console.print(  # noqa: E731
        f"API {topology.rollout.url}   key {key}\npages {topology.rollout.url}/admin/", soft_wrap=True
    )
    Supervisor([services.api(settings), services.beat(settings)]).run_forever(on_ready=ready)


@click.command("serve_gateway", epilog="Example: polar serve_gateway -c topology.yaml --node-id node1")
@CONFIG
@click.option("--node-id", envvar="POLAR_GATEWAY_NODE_ID", required=True, help="Which node of the topology this is.")
def serve_gateway(config: Path, node_id: str) -> None:
    """Serve one node: its proxy and a worker for its lanes."""
    settings = replace(_settings(config), node_id=node_id)
    node = load_topology(config).node(node_id)
    lanes = [lane.name for lane in node.lanes]
    if not lanes:
        raise SpecError.at(f"gateway.nodes[{node_id}]", "has neither lanes nor inference")
    ready = lambda: console.print(f"node {node_id}: proxy {node.url}, lanes {', '.join(lanes)}")  # noqa: E731
    Supervisor([services.proxy(settings, node), services.lane_worker(settings, lanes)]).run_forever(on_ready=ready)


@click.command("serve_engine", epilog="Example: polar serve_engine --script answers.json --port 8001")
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="Checkpoint folder.  [default: the packaged tiny one]"
)
@click.option("--script", type=click.Path(exists=True, path_type=Path), help="Replay the answers of this file instead.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True)
@click.option("--name", help="Name under which the model is served.")
@click.option("--latency-seconds", type=float, default=0.0, help="Pause before a scripted answer.")
def serve_engine(
    model: Path | None, script: Path | None, host: str, port: int, name: str | None, latency_seconds: float
) -> None:
    """Serve the tiny engine, or its scripted twin, with SGLang's and vLLM's token endpoints."""
    from polar.tiny_engine import serve

    serve(model, script, host, port, name, latency_seconds)
