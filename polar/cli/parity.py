"""`polar parity`: whether a lane's engine still gives the log-probabilities that were recorded."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from polar.cli import services
from polar.db import connect
from polar.engines.parity import TOKENS, Parity
from polar.errors import EngineError
from polar.settings import Settings
from polar.stages.parity import lane_parity
from polar.topology import Topology, load_topology, single_node

console = Console(highlight=False)


@click.command(epilog="Example: polar parity --lane gpu0 --alarm 1e-4")
@click.option("-c", "--config", type=click.Path(exists=True, path_type=Path), help="topology.yaml.")
@click.option("--lane", "names", multiple=True, help="Only this lane; may be given several times.")
@click.option("--tokens", type=click.IntRange(min=1), default=TOKENS, show_default=True, help="Tokens to compare.")
@click.option("--alarm", type=float, help="Largest mean difference that is well.  [default: the lane's parity_alarm]")
def parity(config: Path | None, names: tuple[str, ...], tokens: int, alarm: float | None) -> None:
    """Score recently captured tokens again and compare; exit code 1 if a lane differs.

    Run it after weights were pushed: an engine can answer 200 to a push and go on with wrong weights."""
    settings = Settings.load()
    database = connect(_database_url(settings), pool_size=1)
    well = True
    for node in _topology(settings, config).gateway.nodes:
        for lane in node.lanes:
            if names and lane.name not in names:
                continue
            try:
                found = lane_parity(database, lane, tokens=tokens, alarm=alarm)
            except (EngineError, SQLAlchemyError) as error:
                well = False
                console.print(f"[red]bad[/red]  {lane.name:<12} {str(error).splitlines()[0]}", soft_wrap=True)
                continue
            well = well and (found.well or not found.tokens)
            console.print(f"{_mark(found)} {lane.name:<12} {_told(found)}", soft_wrap=True)
    database.dispose()
    raise SystemExit(0 if well else 1)


def _database_url(settings: Settings) -> str:
    """The database of the settings, or the one that `polar up` embeds while it runs. Raises ClickException."""
    url = services.database_url(settings)
    if not url:
        raise click.ClickException(
            f"no Postgres runs in {settings.home_path / 'postgres'}: start `polar up`, or set POLAR_DATABASE_URL to "
            "your own"
        )
    return url


def _topology(settings: Settings, config: Path | None) -> Topology:
    path = config or (Path(settings.topology) if settings.topology else settings.home_path / "topology.yaml")
    return load_topology(path) if path.exists() else single_node(settings.node_id, settings.proxy_port)


def _mark(found: Parity) -> str:
    if not found.tokens:
        return "[yellow]none[/yellow]"
    return "[green]ok[/green]  " if found.well else "[red]bad[/red] "


def _told(found: Parity) -> str:
    if not found.tokens:
        return "no captured tokens of the weights in use: run a task first"
    numbers = f"{found.tokens} tokens, mean difference {found.mean:.2e}, worst {found.worst:.2e}"
    if found.well:
        return numbers
    return f"{numbers}, alarm {found.alarm:.0e}: the engine's weights are not those that sampled; push them again"
