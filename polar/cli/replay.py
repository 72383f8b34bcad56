"""`polar replay`: traces against the engine that sampled them, or calls asked anew of another.

What is compared, and when, is the affair of `scoring` and `regeneration`; `regenerated` shows the latter.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.table import Table

from polar import regeneration
from polar.cli.client import AS_JSON, CONFIG, URL, Client, connect, console, task_ids
from polar.cli.regenerated import Asked, decoder, show_regenerated
from polar.engines import ENGINES
from polar.engines.base import Engine, Passport
from polar.regeneration import How, calls
from polar.registry import load
from polar.scoring import Comparison, compare

TIMEOUT = aiohttp.ClientTimeout(total=600)
TOLERANCE = 1e-3
"""Of float32 engines; half-precision engines differ from themselves by about 1e-2."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One trace beside the engine."""

    session_id: str
    number: int
    fidelity: str
    comparison: Comparison


@click.command(epilog="Example: polar replay tool-lookup")
@click.argument("task_id", required=False, shell_complete=task_ids)
@click.option("--session", "session_id", help="One session instead of a whole task.")
@click.option("--engine-url", help="Score with this engine.  [default: the engine of each session's lane]")
@click.option("--engine", "kind", type=click.Choice(sorted(ENGINES)), default="sglang", help="What --engine-url is.")
@click.option("--regenerate", is_flag=True, help="Ask for every answer anew, and show where it differs.")
@click.option(
    "--sampling",
    "how",
    type=click.Choice(["auto", "recorded", "greedy"]),
    default="auto",
    show_default=True,
    help="Of --regenerate. auto: as recorded if that was greedy or had a seed, else greedy.",
)
@click.option("--tolerance", default=TOLERANCE, show_default=True, help="Largest difference that passes.")
@CONFIG
@URL
@AS_JSON
def replay(
    task_id: str | None,
    session_id: str | None,
    engine_url: str | None,
    kind: str,
    regenerate: bool,
    how: How,
    tolerance: float,
    config: Path | None,
    rollout_url: str | None,
    as_json: bool,
) -> None:
    """Score every trained token anew, from its trace alone, and compare with what was recorded.

    Tokens are compared if they were sampled at temperature 1 or greedily, without top-p, top-k, min-p or penalties,
    and by the weights that the engine has now. Exits 1 if any differs by more than --tolerance, or if none could be
    compared.

    With --regenerate, the engine (another one, or other weights) answers each recorded call anew, from its very prompt
    ids; shown is the first token that differs. Exits 1 if any does."""
    if (task_id is None) == (session_id is None):
        raise click.UsageError("name a task, or a session with --session")
    client = connect(config, rollout_url)
    results = _results(client, task_id, session_id)
    engines = {lane["name"]: lane["engine"] for lane in _lanes(client)}
    if engine_url is not None:
        engines = {result["lane"]: {"engine": kind, "base_url": engine_url} for result in results}
    if regenerate:
        show_regenerated(asyncio.run(_regenerate(client, results, engines, how)), as_json)
        return
    found = asyncio.run(_replay(results, engines))
    overall = Comparison()
    for each in found:
        overall.add(each.comparison)
    if as_json:
        traces = [{"session_id": each.session_id, "trace": each.number, **each.comparison.to_json()} for each in found]
        click.echo(json.dumps({"traces": traces, "overall": overall.to_json()}))
    else:
        console.print(_table(found, overall))
    if not overall.compared or not overall.maximum <= tolerance:
        raise SystemExit(1)


def _results(client: Client, task_id: str | None, session_id: str | None) -> list[dict[str, Any]]:
    """Sessions with their lane and traces."""
    if session_id is not None:
        sessions = [client.call("GET", f"/rollout/session/{session_id}")]
    else:
        sessions = client.call("GET", f"/tasks/{task_id}/sessions")["sessions"]
    found = []
    for session in sessions:
        path = f"/rollout/session/{session['session_id']}/trajectory"
        traces = client.call("GET", path)["traces"]
        if traces:
            found.append({"session_id": session["session_id"], "lane": session["lane"], "traces": traces})
    if not found:
        raise click.ClickException("there is no trace to replay yet; `polar status` shows when a session has ended")
    return found


def _lanes(client: Client) -> list[dict[str, Any]]:
    return [lane for node in client.call("GET", "/rollout/status")["nodes"]["nodes"] for lane in node["lanes"]]


async def _replay(results: list[dict[str, Any]], lanes: dict[str, dict[str, Any]]) -> list[Replayed]:
    found = []
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        async for result, engine, passport in _beside(results, lanes, http):
            for number, trace in enumerate(result["traces"]):
                comparison = await compare(engine, trace, passport.weight_version)
                found.append(Replayed(result["session_id"], number, trace["fidelity"], comparison))
    return found


async def _regenerate(
    client: Client, results: list[dict[str, Any]], lanes: dict[str, dict[str, Any]], how: How
) -> list[Asked]:
    found = []
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        async for result, engine, passport in _beside(results, lanes, http):
            decode = decoder(passport.tokenizer, passport.model)
            for call in calls(client.completions(result["session_id"])):
                found.append(Asked(result["session_id"], await regeneration.regenerate(engine, call, how), decode))
    return found


async def _beside(
    results: list[dict[str, Any]], lanes: dict[str, dict[str, Any]], http: aiohttp.ClientSession
) -> AsyncIterator[tuple[dict[str, Any], Engine, Passport]]:
    """Each session with the engine that it is held to; an engine is asked once what it is."""
    passports: dict[str, tuple[Engine, Passport]] = {}
    for result in results:
        lane = result["lane"]
        if lane not in passports:
            if lane not in lanes:
                raise click.ClickException(f"lane {lane} is gone; name an engine with --engine-url")
            passports[lane] = await _engine(http, lanes[lane])
        yield result, *passports[lane]


async def _engine(http: aiohttp.ClientSession, lane: dict[str, Any]) -> tuple[Engine, Passport]:
    cls = load("engine", ENGINES, lane["engine"], Engine)  # type: ignore[type-abstract]
    engine = cls(lane["base_url"], http, model=lane.get("model"))
    passport = await engine.passport()
    if passport.scripted:
        raise click.ClickException(
            f"the engine at {engine.url} replays a script and cannot score; name another with --engine-url"
        )
    return engine, passport


def _table(found: list[Replayed], overall: Comparison) -> Table:
    table = Table("session", "trace", "fidelity", "trained", "compared", "mean difference", "largest", "left out")
    for each in found:
        table.add_row(each.session_id[4:12], str(each.number), each.fidelity, *_figures(each.comparison))
    table.add_section()
    table.add_row("all", str(len(found)), "", *_figures(overall))
    return table


def _figures(comparison: Comparison) -> tuple[str, ...]:
    left_out = ", ".join(f"{count} {reason}" for reason, count in comparison.skipped.items()) or "–"
    mean = "–" if comparison.mean is None else f"{comparison.mean:.2g}"
    largest = f"{comparison.maximum:.2g}" if comparison.compared else "–"
    return (str(comparison.trained), str(comparison.compared), mean, largest, left_out)
