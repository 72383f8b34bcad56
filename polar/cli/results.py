"""`polar results`: the results feed as JSON lines, to the terminal or a file. Progress goes to stderr.

A line is written and flushed before its cursor is acknowledged, so a command that is killed loses nothing: the next one
begins with what was not acknowledged. What it may write twice has the same session_id.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click
import orjson
from rich.console import Console

from polar.cli.client import CONFIG, URL, Client, connect, problem
from polar.client import ClientError, Retry
from polar.client.feed import WAIT_SECONDS, Reader
from polar.client.retry import NO_RETRY

FOLLOW = Retry(unreachable_seconds=float("inf"), longest_pause=2.0)
"""Whoever follows waits for a server that restarts, however long."""
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
    client = connect(config, rollout_url, FOLLOW if follow else NO_RETRY)
    wait = WAIT_SECONDS if follow else 0.0
    reader = Reader(after, consumer, group, task_id, view == "full", limit, wait)
    with _opened(output, append=consumer is not None or after is not None) as file:
        writer = _Writer(client, reader, file, on_disk=output is not None)
        try:
            writer.run()
        except KeyboardInterrupt:
            errors.print("stopped")
        finally:
            place = f"; go on with --after {writer.cursor}" if writer.cursor and consumer is None else ""
            errors.print(f"{writer.count} results{place}")


class _Writer:
    """Reads pages, writes their results, and acknowledges them."""

    def __init__(self, client: Client, reader: Reader, file: IO[bytes], *, on_disk: bool) -> None:
        self.client, self.reader, self.file, self.on_disk = client, reader, file, on_disk
        self.count = 0
        self.cursor: str | None = None
        """Of the last result that was written."""

    def run(self) -> None:
        came = 1
        while came or self.reader.wait:
            try:
                came = self._page()
            except ClientError as error:
                raise problem(error) from None

    def _page(self) -> int:
        came = 0
        for result in self.client.page(self.reader):
            self.file.write(orjson.dumps(result.raw, option=orjson.OPT_APPEND_NEWLINE))
            self.cursor = result.cursor
            came += 1
        self.count += came
        self.file.flush()
        if came and errors.is_terminal:
            errors.print(f"{self.count} results, cursor {self.cursor}")
        if came and self.reader.consumer is not None and self.cursor is not None:
            if self.on_disk:
                os.fsync(self.file.fileno())
            self.client.ack(self.reader.consumer, self.cursor)
        return came


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
