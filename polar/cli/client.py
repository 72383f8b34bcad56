"""`submit`, `status`, `cancel`: the commands that talk to a running Polar over REST, with `polar.client`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import polar.client
from polar.client import AuthError, ClientError, Retry, UnreachableError
from polar.client.retry import NO_RETRY
from polar.dispatch import STAGE_NAMES
from polar.errors import PolarError
from polar.remedies import REMEDIES
from polar.settings import Settings

# Where nobody looks at a terminal (CI, a file), a table needs no narrowing.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
DONE_WORDS = frozenset({"completed", "failed", "cancelled"})


class Client(polar.client.Client):
    """The client for a terminal: it gives up at once, and says what to do next in a click.ClickException."""

    def __init__(self, url: str, key: str | None, *, retry: Retry = NO_RETRY) -> None:
        self.key = key
        super().__init__(url, key, timeout=90.0, retry=retry)

    def call(
        self, method: str, path: str, *, params: dict[str, Any] | None = None, json: Any = None, timeout: float = 0.0
    ) -> Any:
        """Any path of the API. `timeout` is how long the server may take on purpose."""
        try:
            return self.request(method, path, params=params, body=json, wait=timeout)
        except ClientError as error:
            raise problem(error) from None


def problem(error: ClientError) -> click.ClickException:
    """What became of a request, in words."""
    if isinstance(error, UnreachableError):
        return click.ClickException(f"{error}\n  start it with `polar up`, or name another with --rollout-url")
    if isinstance(error, AuthError) and error.status == 401:
        return click.ClickException(f"{error}\n  set POLAR_API_KEY to it")
    return click.ClickException(str(error))


def connect(config: Path | None, rollout_url: str | None, retry: Retry = NO_RETRY) -> Client:
    """The Polar that the flags, the environment or the home folder name."""
    settings = Settings.load()
    effective = settings.home_path / "topology.yaml"
    path = config or (effective if effective.exists() else None)
    url = rollout_url or (_address(path) if path else f"http://127.0.0.1:{settings.port}")
    key_file = settings.home_path / "api_key"
    key = os.environ.get("POLAR_API_KEY") or (key_file.read_text().strip() if key_file.exists() else None)
    return Client(url, key, retry=retry)


def _address(topology: Path) -> str:
    # Needs the server's own models, which a machine that only talks to a Polar elsewhere may lack.
    from polar.topology import load_topology

    return load_topology(topology).rollout.url


def load_task(path: Path) -> dict[str, Any]:
    """A task file, JSON or YAML; relative paths of the node are taken from the file's folder."""
    try:
        task = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise click.ClickException(f"{path}: neither JSON nor YAML, mend that line: {error}") from None
    if not isinstance(task, dict):
        raise click.ClickException(f"{path}: a task is a mapping of fields, such as examples/tool_lookup/task.yaml")
    runtime = task.get("runtime")
    for name in ("prepare", "eval_prepare"):
        for action in (isinstance(runtime, dict) and runtime.get(name)) or []:
            if isinstance(action, dict) and isinstance(action.get("source"), str):
                action["source"] = str((path.parent / action["source"]).resolve())
    evaluator = task.get("evaluator")
    config = isinstance(evaluator, dict) and evaluator.get("config")
    for name in ("task_dir", "tests_dir", "dataset"):
        # A dataset may as well be the name of one that is fetched.
        if isinstance(config, dict) and isinstance(config.get(name), str) and (path.parent / config[name]).exists():
            config[name] = str((path.parent / config[name]).resolve())
    return task


def task_ids(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: the newest tasks whose names begin so. A shell that asks wants names, and no reason why not."""
    try:
        listed = connect(None, os.environ.get("POLAR_URL")).call("GET", "/tasks", params={"limit": 200}, timeout=0.0)
    except (click.ClickException, PolarError):
        return []
    return [row["task_id"] for row in listed["tasks"] if row["task_id"].startswith(incomplete)]


CONFIG = click.option(
    "-c", "--config", type=click.Path(exists=True, path_type=Path), help="topology.yaml that names the API."
)
URL = click.option("--rollout-url", envvar="POLAR_URL", help="Address of the API.  [default: from the topology]")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.command(epilog="Example: polar submit examples/tool_lookup/task.yaml --num-samples 8")
@click.argument("task_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@CONFIG
@URL
@AS_JSON
@click.option("--task-id", help="Name of the task instead of the file's.")
@click.option("--num-samples", type=click.IntRange(1), help="Sessions instead of the file's number.")
@click.option("--poll-interval", default=0.5, show_default=True, help="Seconds between looks.")
@click.option("--detach", is_flag=True, help="Return as soon as the task is accepted.")
def submit(
    task_file: Path,
    config: Path | None,
    rollout_url: str | None,
    as_json: bool,
    task_id: str | None,
    num_samples: int | None,
    poll_interval: float,
    detach: bool,
) -> None:
    """Submit a task and watch it to its end. Exit code 0 only if it completed."""
    client = connect(config, rollout_url)
    task = load_task(task_file)
    given = {"task_id": task_id, "num_samples": num_samples}
    task |= {name: value for name, value in given.items() if value is not None}
    accepted = client.call("POST", "/rollout/task/submit", json=task)
    if detach:
        console.print(json.dumps(accepted) if as_json else f"accepted: {accepted['task_id']}")
        return
    final = watch(client, accepted["task_id"], poll_interval, quiet=as_json)
    if as_json:
        click.echo(json.dumps(final))
    else:
        console.print(sessions_table(client.call("GET", f"/tasks/{final['task_id']}/sessions")["sessions"]))
        show_failures(final)
        show_withheld(final)
    if final["status"] != "completed":
        raise SystemExit(1)


def watch(client: Client, task_id: str, poll_interval: float = 0.5, *, quiet: bool = False) -> dict[str, Any]:
    """Show a bar until the task has ended; its final status, without token arrays."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=console, disable=quiet) as progress:
        bar = progress.add_task(task_id, total=None, now="")
        while True:
            listed = client.call("GET", f"/tasks/{task_id}/sessions")
            rows = listed["sessions"]
            ended = sum(row["status"] in ("COMPLETED", "ERROR", "TIMEOUT") for row in rows)
            now = ", ".join(
                f"{n} {word}"
                for word, n in _tally(row["stage"] for row in rows if row["state"] in ("queued", "running"))
            )
            progress.update(bar, total=len(rows), completed=ended, now=now)
            if listed["status"] in DONE_WORDS:
                status: dict[str, Any] = client.call("GET", f"/rollout/task/{task_id}", params={"view": "summary"})
                return status
            time.sleep(poll_interval)


def _tally(words: Any) -> list[tuple[Any, int]]:
    counts: dict[Any, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return list(counts.items())


def sessions_table(rows: list[dict[str, Any]]) -> Table:
    """Sessions with what they cost and earned; under "stages", the seconds of each stage in order."""
    table = Table("session", "state", "lane", "turns", "tokens", "stages, s", "reward")
    for row in rows:
        spent = " ".join(f"{row['stages'].get(stage, {}).get('run_ms', 0) / 1000:.1f}" for stage in STAGE_NAMES)
        reward = "–" if row["reward"] is None else f"{row['reward']:.2f}"
        state = row["state"] if not row["error"] else f"{row['state']}: {row['error'][:60]}"
        numbers = (str(row["turns"]), str(row["sampled_tokens"]), spent, reward)
        table.add_row(row["session_id"][4:12], state, row["lane"] or "–", *numbers)
    return table


def show_failures(final: dict[str, Any]) -> None:
    """A line for each reason why sessions failed, with what to do next."""
    errors = [result["metadata"].get("error") or {} for result in final["results"]]
    for (code, message), count in _tally((error["code"], error["message"]) for error in errors if "code" in error):
        then = f" What to do: {REMEDIES[code].do}" if code in REMEDIES else ""
        console.print(f"{count} × {code}: {message}.{then}", soft_wrap=True, markup=False)


def show_withheld(final: dict[str, Any]) -> None:
    """A line for each reason why traces are not handed out for training."""
    decisions = [
        (trace["decision"]["rule"], trace["decision"]["reason"])
        for result in final["results"]
        for trace in result["trajectory"]["traces"]
        if trace["decision"] and not trace["trainable"]
    ]
    for (rule, reason), count in _tally(decisions):
        console.print(f"not for training: {count} trace{'s' * (count > 1)}, {rule}: {reason}", soft_wrap=True)


@click.command(epilog="Example: polar status my-task")
@click.argument("task_id", required=False, shell_complete=task_ids)
@CONFIG
@URL
@AS_JSON
def status(task_id: str | None, config: Path | None, rollout_url: str | None, as_json: bool) -> None:
    """Show nodes, lanes and tasks, or the sessions of one task."""
    client = connect(config, rollout_url)
    if task_id:
        listed = client.call("GET", f"/tasks/{task_id}/sessions")
        if as_json:
            click.echo(json.dumps(listed))
            return
        console.print(sessions_table(listed["sessions"]))
        final = client.call("GET", f"/rollout/task/{task_id}", params={"view": "summary"})
        show_failures(final)
        show_withheld(final)
        return
    overview = client.call("GET", "/rollout/status")
    if as_json:
        click.echo(json.dumps(overview))
        return
    nodes = Table("node", "lane", "engine", "healthy", "prewarm", "ready", "execute", "later")
    for node in overview["nodes"]["nodes"]:
        load = node["metrics"]
        for lane in node["lanes"]:
            health = "draining" if node["draining"] else "yes" if node["healthy"] else "no"
            engine = f"{lane['engine']['engine']} {lane['engine']['base_url']}"
            numbers = (load["init_inflight"], load["ready_depth"], load["run_inflight"], load["postrun_inflight"])
            nodes.add_row(node["node_id"], lane["name"], engine, health, *map(str, numbers))
    console.print(nodes)
    tasks = Table("task", "state", "harness", "sessions", "failed", "mean reward")
    for row in client.call("GET", "/tasks", params={"limit": 20})["tasks"]:
        reward = "–" if row["mean_reward"] is None else f"{row['mean_reward']:.2f}"
        done = f"{row['completed_sessions']}/{row['num_samples']}"
        tasks.add_row(row["task_id"], row["status"], row["harness"], done, str(row["errored_sessions"]), reward)
    console.print(tasks)


@click.command(epilog="Example: polar cancel my-task")
@click.argument("task_id", shell_complete=task_ids)
@CONFIG
@URL
def cancel(task_id: str, config: Path | None, rollout_url: str | None) -> None:
    """Cancel a task and every session of it that has not ended."""
    answer = connect(config, rollout_url).call("DELETE", f"/rollout/task/{task_id}")
    console.print(
        f"{task_id}: {answer['status']}, {answer['completed_sessions']} of {answer['total_sessions']} sessions ended"
    )
