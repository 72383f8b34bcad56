"""`policy`, `pause`, `resume`: the policy's version and the gate of every node, over REST."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from polar.cli.client import AS_JSON, CONFIG, URL, connect, console


@click.command(epilog="Example: polar policy --version 12 --max-staleness 2")
@CONFIG
@URL
@AS_JSON
@click.option("--version", help="The version from now on; whole numbers can be compared.")
@click.option("--name", help="What the policy is called.")
@click.option("--max-staleness", type=click.IntRange(0), help="Versions that a trained token may be behind.")
@click.option("--any-staleness", is_flag=True, help="Take the bound away.")
def policy(
    config: Path | None,
    rollout_url: str | None,
    as_json: bool,
    version: str | None,
    name: str | None,
    max_staleness: int | None,
    any_staleness: bool,
) -> None:
    """Show the policy and the proxies, or set its name, version and staleness bound."""
    given = {"version": version, "name": name, "max_staleness": max_staleness}
    body: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if any_staleness:
        body["max_staleness"] = None
    client = connect(config, rollout_url)
    found = client.call("PUT", "/rollout/policy", json=body) if body else client.call("GET", "/rollout/policy")
    _show(found, as_json)


@click.command(epilog="Example: polar push /checkpoints/12 --version 12 --mode abort")
@click.argument("path")
@CONFIG
@URL
@AS_JSON
@click.option("--version", required=True, help="What the weights are called; whole numbers can be compared.")
@click.option(
    "--mode",
    type=click.Choice(["drain", "abort"]),
    default="drain",
    show_default=True,
    help="drain: let calls in flight end first. abort: cut them; they go on with the new weights.",
)
@click.option("--lane", "lanes", multiple=True, help="Only this lane's engine; may be given several times.")
@click.option(
    "--probe", type=click.File("rb"), help="JSON with prompt_ids, output_ids and their logprobs, to check by."
)
@click.option("--wait", default=300.0, show_default=True, help="Seconds for the gate to hold, and for the engines.")
def push(
    path: str,
    config: Path | None,
    rollout_url: str | None,
    as_json: bool,
    version: str,
    mode: str,
    lanes: tuple[str, ...],
    probe: Any,
    wait: float,
) -> None:
    """Give every lane's engine the weights at PATH, with the gate closed meanwhile.

    PATH is a checkpoint's folder as the engines' machines see it. If any engine fails the gate stays closed."""
    body: dict[str, Any] = {"version": version, "path": path, "mode": mode, "wait": wait}
    if lanes:
        body["lanes"] = lanes
    if probe is not None:
        body["probe"] = json.load(probe)
    client = connect(config, rollout_url)
    found = client.call("POST", "/rollout/policy/push", json=body, timeout=2 * wait + 30)
    _show(found, as_json)


@click.command(epilog="Example: polar pause --mode abort --wait 60")
@CONFIG
@URL
@AS_JSON
@click.option(
    "--mode",
    type=click.Choice(["drain", "abort"]),
    default="drain",
    show_default=True,
    help="drain: let what is in flight end. abort: cut it; it goes on after `polar resume`.",
)
@click.option("--wait", default=300.0, show_default=True, help="Seconds to wait until every proxy holds.")
def pause(config: Path | None, rollout_url: str | None, as_json: bool, mode: str, wait: float) -> None:
    """Hold new generations on every node. Exit code 0 only once nothing is sampled anywhere."""
    client = connect(config, rollout_url)
    params = {"mode": mode, "wait": wait}
    _show(client.call("POST", "/rollout/pause", params=params, timeout=wait + 30), as_json)


@click.command(epilog="Example: polar resume")
@CONFIG
@URL
@AS_JSON
def resume(config: Path | None, rollout_url: str | None, as_json: bool) -> None:
    """Let generation go on everywhere, and say what became of the calls that were in flight."""
    _show(connect(config, rollout_url).call("POST", "/rollout/resume"), as_json)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    bound = "any" if found["max_staleness"] is None else found["max_staleness"]
    version = "none" if found["version"] is None else found["version"]
    console.print(f"policy {found['name'] or '(no name)'}, version {version}, staleness {bound}, gate {found['gate']}")
    for proxy in found["proxies"]:
        console.print(f"  {proxy['id']}: {proxy['in_flight']} in flight, {proxy['held']} held", soft_wrap=True)
    if calls := found.get("calls"):
        console.print("calls: " + ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in calls.items()))
    for lane, row in found.get("lanes", {}).items():
        gap = "" if row["difference"] is None else f", probe {row['difference']:.2g} nats off"
        console.print(f"  {lane}: has the weights after {row['seconds']:.1f} s{gap}")
    for proxy in found.get("lost", []):
        console.print(f"  lost: {proxy['id']} stopped with {proxy['in_flight']} calls in flight", soft_wrap=True)
    for proxy_id in found.get("not_resumed", []):
        console.print(f"  not yet resumed: {proxy_id}", soft_wrap=True)
