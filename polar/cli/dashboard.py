"""`polar dashboard`: the address of the pages, with a link that logs in. The pages themselves are the API's."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import click
import httpx

from polar.cli.client import connect

TIMEOUT_SECONDS = 10.0


def login_link(url: str, key: str | None) -> str:
    """A link to the pages that logs in for an hour; to their login form where the key makes none."""
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.post(f"{url}/admin/ticket", headers=headers, timeout=TIMEOUT_SECONDS)
        return url + str(answer.raise_for_status().json()["path"])
    except (httpx.HTTPError, ValueError):
        return f"{url}/admin/"


@click.command(epilog="Example: polar dashboard --no-open")
@click.option("-c", "--config", type=click.Path(exists=True, path_type=Path), help="topology.yaml that names the API.")
@click.option("--rollout-url", help="URL of the API.")
@click.option("--open/--no-open", "open_", default=True, show_default=True, help="Open a browser, where there is one.")
@click.option("--host", hidden=True, help="Of the original: its dashboard was a server of its own.")
@click.option("--port", hidden=True)
@click.option("--save-dir", hidden=True)
@click.option("--log-level", hidden=True)
def dashboard(
    config: Path | None,
    rollout_url: str | None,
    open_: bool,
    host: str | None,
    port: str | None,
    save_dir: str | None,
    log_level: str | None,
) -> None:
    """Show where the pages are, with a link that logs in.

    The API serves them at /admin; nothing has to be started. The original's own flags are taken and change nothing."""
    client = connect(config, rollout_url)
    client.call("GET", "/healthz")
    link = login_link(client.url, client.key)
    click.echo(link)
    for name, value in (("--host", host), ("--port", port), ("--save-dir", save_dir)):
        if value is not None:
            where = urlsplit(client.url).netloc
            click.echo(f"{name} {value} is not needed: the pages are served by the API at {where}", err=True)
    if open_ and not link.endswith("/admin/") and _has_browser():
        webbrowser.open(link)


def _has_browser() -> bool:
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
