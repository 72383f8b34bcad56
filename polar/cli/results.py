"""`polar results`: the results feed as JSON lines, to the terminal or a file. Progress goes to stderr.

A line is written and flushed before its cursor is acknowledged, so a command that is killed loses nothing: the next one
begins with what was not acknowledged. What it may write twice has the same session_id.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click
import httpx
from rich.console import Console

from polar.cli.client import CONFIG, URL, Client, connect

WAIT_SECONDS = 30.0
AGAIN_SECONDS = 1.0
BLOCK = 1 << 16
errors = Console(stderr=True, highlight=False)


@click.command(epilog="Example: polar results --follow --consumer trainer --output results.jsonl")
@CONFIG
@URL
@click.option("--follow", is_flag=True, help="Wait for more, until Ctrl-C.")
@click.option("--consumer", help="Go on from where this name has acknowledged, and acknowledge what is written.")
@click.option("--after", help="Begin after this cursor.  [default: the consumer's, or the beginning]")
@click.option("--group", help="Only sessions of tasks with this metadata.group_id.")
@click.option("--task-id", help="Only sessions of tasks of this name.")
@click.option("--view", type=click.Choice(["full", "summary"]), default="full", show_default=True)
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Results per request.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write here; appended to with --consumer or --after, else begun anew.",
)
def results(
    config: Path | None,
    rollout_url: str | None,
    follow: bool,
    consumer: str | None,
    after: str | None,
    group: str | None,
    task_id: str | None,
    view: str,
    limit: int,
    output: Path | None,
) -> None:
    """Write the results of sessions that have ended, one JSON object a line, in the order of the feed."""
    client = connect(config, rollout_url)
    given = {"consumer": consumer, "after": after, "group": group, "task_id": task_id, "view": view, "limit": limit}
    params = {name: value for name, value in given.items() if value is not None}
    with _opened(output, append=consumer is not None or after is not None) as file:
        reader = _Reader(client, params, file, on_disk=output is not None)
        try:
            reader.run(follow)
        except KeyboardInterrupt:
            errors.print("stopped")
        finally:
            place = f"; go on with --after {reader.cursor}" if reader.cursor and consumer is None else ""
            errors.print(f"{reader.count} results{place}")


class _Reader:
    """Reads pages, writes their lines, and acknowledges them."""

    def __init__(self, client: Client, params: dict[str, Any], file: IO[bytes], *, on_disk: bool) -> None:
        self.client, self.params, self.file, self.on_disk = client, params, file, on_disk
        self.count = 0
        self.cursor: str | None = None
        """Of the last line that was written."""
        self.acknowledged: str | None = None

    def run(self, follow: bool) -> None:
        wait = {"wait": WAIT_SECONDS} if follow else {}
        came = 1
        while came or follow:
            try:
                came = self._page(self.params | wait | ({"after": self.cursor} if self.cursor else {}))
                self._acknowledge()
            except httpx.HTTPError as error:
                answered = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
                if not follow or answered is not None and answered < 500:
                    raise self.client.problem(error) from None
                errors.print(f"{answered or type(error).__name__}: trying again", soft_wrap=True)
                time.sleep(AGAIN_SECONDS)

    def _page(self, params: dict[str, Any]) -> int:
        came = 0
        with self.client.lines("/rollout/results", params=params) as lines:
            for line in lines:
                # A page that breaks off is gone on with after its last whole line.
                self.file.write(line + b"\n")
                self.cursor = json.loads(line)["cursor"]
                came += 1
                self.count += 1
        self.file.flush()
        if came and errors.is_terminal:
            errors.print(f"{self.count} results, cursor {self.cursor}")
        return came

    def _acknowledge(self) -> None:
        consumer = self.params.get("consumer")
        if consumer is None or self.cursor == self.acknowledged:
            return
        self.file.flush()
        if self.on_disk:
            os.fsync(self.file.fileno())
        self.client.request("POST", "/rollout/results/ack", json={"consumer": consumer, "cursor": self.cursor})
        self.acknowledged = self.cursor


@contextmanager
def _opened(output: Path | None, *, append: bool) -> Iterator[IO[bytes]]:
    """Standard output, or the file; a line that a killed command left unfinished is cut off first."""
    if output is None:
        yield sys.stdout.buffer
        return
    if append and output.exists():
        _cut_unfinished(output)
    with output.open("ab" if append else "wb") as file:
        yield file


def _cut_unfinished(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)
