"""`polar export`: stored sessions as files to learn from. What is taken and how is `polar.exporting`'s affair."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from polar.cli.client import CONFIG, URL, connect, problem
from polar.client import ClientError, SessionResult
from polar.client.feed import PAGE, Reader
from polar.exporting import KINDS, Exported, Filters, Kind, Preference, Rejection, Sft, Split, SplitError
from polar.exporting import export as write
from polar.exporting.files import FORMATS

SUMMARIES = 500
"""On a page: they have no tokens."""
errors = Console(stderr=True, highlight=False)
TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"])


@click.command("export", epilog="Example: polar export rejection data --min-reward 1 --split train=0.9,test=0.1")
@click.argument("kind", type=click.Choice(sorted(KINDS)))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@CONFIG
@URL
@click.option("--min-reward", type=float, help="Of the session, at least.")
@click.option("--max-reward", type=float, help="Of the session, at most.")
@click.option(
    "--fidelity",
    multiple=True,
    type=click.Choice(["exact", "drifted", "unverified", "any"]),
    default=("exact",),
    show_default=True,
    help="Of the trace; may be given several times.",
)
@click.option("--harness", multiple=True, help="Of the task; may be given several times.")
@click.option("--task-id", "tasks", multiple=True, help="Pattern of task ids, such as 'swe-*'; several times.")
@click.option("--group", help="Only tasks with this metadata.group_id.")
@click.option("--since", type=TIME, help="Ended then or later, in UTC.")
@click.option("--until", type=TIME, help="Ended before then, in UTC.")
@click.option("--untrainable", is_flag=True, help="Also traces that may not train. Stale ones are in it anyway.")
@click.option("--keep", type=click.IntRange(1), default=1, show_default=True, help="rejection: sessions of a group.")
@click.option("--pairs", type=click.IntRange(1), default=1, show_default=True, help="preference: pairs of a group.")
@click.option("--margin", type=float, default=0.1, show_default=True, help="preference: how far apart rewards are.")
@click.option("--split", "shares", default="train=1", show_default=True, help="Shares, such as train=0.9,test=0.1.")
@click.option("--seed", default=0, show_default=True, help="Of the split, and between sessions of the same reward.")
@click.option("--format", "form", type=click.Choice(sorted(FORMATS)), default="jsonl", show_default=True)
def export(
    kind: str,
    folder: Path,
    config: Path | None,
    rollout_url: str | None,
    min_reward: float | None,
    max_reward: float | None,
    fidelity: tuple[str, ...],
    harness: tuple[str, ...],
    tasks: tuple[str, ...],
    group: str | None,
    since: datetime | None,
    until: datetime | None,
    untrainable: bool,
    keep: int,
    pairs: int,
    margin: float,
    shares: str,
    seed: int,
    form: str,
) -> None:
    """Write stored sessions as data: sft (each session), rejection (the best of each group) or preference (pairs).

    FOLDER gets a file for each split and manifest.json. No group is ever in two splits."""
    chosen = _kind(kind, seed, keep, pairs, margin)
    if kind == Rejection.name and min_reward is None:
        raise click.UsageError("rejection needs --min-reward: what an evaluator must have given to be kept")
    if form == "parquet":
        _need_pyarrow()
    try:
        split = Split.read(shares, seed)
    except SplitError as error:
        raise click.UsageError(f"--split: {error}") from None
    filters = Filters(
        min_reward=min_reward,
        max_reward=max_reward,
        fidelity=() if "any" in fidelity else fidelity,
        harness=harness,
        tasks=tasks,
        since=_seconds(since),
        until=_seconds(until),
        untrainable=untrainable,
    )
    # One task by its whole name is looked up, not looked for.
    task_id = tasks[0] if len(tasks) == 1 and not set(tasks[0]) & set("*?[") else None

    def read(full: bool) -> Iterator[SessionResult]:
        reader = Reader(group=group, task_id=task_id, full=full, limit=PAGE if full else SUMMARIES)
        came = True
        with connect(config, rollout_url) as client:
            while came:
                came = False
                try:
                    for result in client.page(reader):
                        came = True
                        yield result
                except ClientError as error:
                    raise problem(error) from None

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} sessions"))
    with Progress(*columns, TimeElapsedColumn(), console=errors) as progress:
        bar = progress.add_task("looking", total=None)
        seen = lambda what, now, of: progress.update(bar, description=what, completed=now, total=of)  # noqa: E731
        done = write(read, folder, chosen, filters=filters, split=split, form=form, seen=seen)
    _show(done, folder)


def _kind(name: str, seed: int, keep: int, pairs: int, margin: float) -> Kind:
    own: dict[str, dict[str, Any]] = {
        Rejection.name: {"keep": keep},
        Preference.name: {"pairs": pairs, "margin": margin},
        Sft.name: {},
    }
    return KINDS[name](seed, **own[name])


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.replace(tzinfo=UTC).timestamp()


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise click.ClickException("Parquet needs pyarrow: pip install 'polar-rollout[arrow]'") from None


def _show(done: Exported, folder: Path) -> None:
    table = Table("file", "rows", "sessions", "groups", "tokens")
    for name in done.splits.values():
        numbers = (f"{name[column]:,}" for column in ("rows", "sessions", "groups", "tokens"))
        table.add_row(str(folder / name["file"]), *numbers)
    errors.print(table)
    why = ", ".join(f"{count} {reason}" for reason, count in done.left_out.most_common())
    errors.print(f"{done.sessions} of {done.seen} sessions" + (f"; left out: {why}" if why else ""))
    if not done.rows:
        raise click.ClickException("nothing was written to learn from; loosen the filters named above")
