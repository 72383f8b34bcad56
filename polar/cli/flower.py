"""`polar flower`: Flower beside Polar, behind the pages' login.

It listens on loopback, with a password that only the pages know; who is logged in there with the scope admin reaches it
at /admin/flower/. Flower's own REST API is behind the same password.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from polar.cli.dashboard import login_link
from polar.cli.up import BROKER_URL, console
from polar.errors import SpecError
from polar.settings import Settings, child_environ
from polar.topology import load_topology

ADDRESS = "127.0.0.1"


def prepared(settings: Settings) -> Settings:
    """The settings with the broker and the secret of the home folder, where none are set. Raises SpecError."""
    found: dict[str, str] = {}
    for name, file in (("broker_url", BROKER_URL), ("pages_secret", "pages_secret")):
        path = settings.home_path / file
        if not getattr(settings, name) and path.exists():
            found[name] = path.read_text().strip()
    settings = replace(settings, **found)  # type: ignore[arg-type]
    if not settings.broker_url:
        raise SpecError.at(
            "POLAR_BROKER_URL", f"is not set, and {settings.home_path} has no embedded broker; start `polar up` first"
        )
    if not settings.pages_secret:
        raise SpecError.at("POLAR_PAGES_SECRET", "is not set; give the API and Flower the same one")
    return settings


def command(settings: Settings, path: str) -> list[str]:
    """How Flower is started below this path, without its password, which stands in its environment."""
    port = str(settings.flower_port)
    flags = [f"--address={ADDRESS}", f"--port={port}", f"--url_prefix={path.strip('/')}", "--logging=WARNING"]
    return [sys.executable, "-m", "celery", "-A", "polar", "flower", *flags]


@click.command(epilog="Example: polar flower --home /data/polar")
@click.option("--home", help="Home folder of the Polar that is watched.  [default: .polar]")
@click.option("--port", type=int, help="Port on this machine.  [default: 5555]")
def flower(home: str | None, port: int | None) -> None:
    """Start Flower, which the pages show at /admin/flower/."""
    # Imported here, so that no other command waits for Flask.
    from polar.admin.flower import PATH, USER, password

    if importlib.util.find_spec("flower") is None:
        raise click.ClickException("Flower is not installed: pip install 'polar-rollout[flower]'")
    settings = Settings.load()
    given = {"home": home, "flower_port": port}
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    settings = prepared(replace(settings, home=str(settings.home_path)))
    key_file = Path(settings.home) / "api_key"
    key = key_file.read_text().strip() if key_file.exists() else None
    topology = settings.home_path / "topology.yaml"
    base = load_topology(topology).rollout.url if topology.exists() else f"http://{ADDRESS}:{settings.port}"
    console.print(f"Flower is at {base}{PATH}/ behind the pages' login: {login_link(base, key)}", soft_wrap=True)
    # Flower reads its options from FLOWER_<NAME> too: a command line can be read by other users.
    environ = child_environ(settings, FLOWER_BASIC_AUTH=f"{USER}:{password(settings)}")
    os.execve(sys.executable, command(settings, PATH), environ)
