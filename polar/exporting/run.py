"""An export from end to end: read what there is in summary, pick, read the picked in full, write, describe.

Two readings instead of one, so that what is held is a line for each session and the sessions of pairs that are not
whole yet: never all tokens. What ends between the readings is not in the export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from polar.client.types import Json, SessionResult
from polar.exporting.files import FORMATS, Lines
from polar.exporting.filters import Filters
from polar.exporting.kinds import Candidate, Entry, Kind, group_of
from polar.exporting.split import Split

Read = Callable[[bool], Iterable[SessionResult]]
"""Reads all results: in full, or in summary."""
Seen = Callable[[str, int, int | None], None]
"""Told how far it is: what is being done, how many sessions, of how many."""


@dataclass(slots=True)
class Exported:
    """What was done, for the manifest and for people."""

    rows: int = 0
    sessions: int = 0
    """That are in at least one row."""
    seen: int = 0
    """That were looked at."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Sessions by the reason why they are not in it."""
    splits: dict[str, Json] = field(default_factory=dict)
    """Of each: its file, rows, tokens, sessions, groups and hash."""
    manifest: Json = field(default_factory=dict)


def export(
    read: Read,
    folder: Path,
    kind: Kind,
    *,
    filters: Filters = Filters(),
    split: Split = Split(),
    form: str = "jsonl",
    seen: Seen = lambda *_: None,
) -> Exported:
    """Write a file for each split and manifest.json into `folder`."""
    done = Exported()
    candidates = list(_candidates(read(False), filters, done, seen))
    entries = list(kind.pick(candidates))
    picked = {session_id for entry in entries for session_id in entry}
    done.left_out.update({"not picked": len(candidates) - len(picked)} if len(candidates) > len(picked) else {})
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, set[str]] = {name: set() for name, _ in split.shares}
    members: dict[str, set[str]] = {name: set() for name, _ in split.shares}
    with ExitStack() as stack:
        files: dict[str, Lines] = {
            name: stack.enter_context(FORMATS[form](folder / f"{name}.{form}", kind.columns))
            for name, _ in split.shares
        }
        for results in _whole(read(True) if picked else (), entries, seen):
            group = group_of(results[0])
            name = split.of(group)
            for row in kind.rows(results, filters):
                files[name].write(row)
                done.rows += 1
            groups[name].add(group)
            members[name] |= {result.session_id for result in results}
    for name, file in files.items():
        done.splits[name] = {**file.described(), "sessions": len(members[name]), "groups": len(groups[name])}
    done.sessions = sum(map(len, members.values()))
    done.manifest = _manifest(done, kind, filters, split)
    (folder / "manifest.json").write_bytes(orjson.dumps(done.manifest, option=orjson.OPT_INDENT_2) + b"\n")
    return done


def _candidates(results: Iterable[SessionResult], filters: Filters, done: Exported, seen: Seen) -> Iterator[Candidate]:
    for result in results:
        done.seen += 1
        seen("looking", done.seen, None)
        reason = filters.session(result)
        if reason is None:
            yield Candidate(result.session_id, group_of(result), result.reward)
        else:
            done.left_out[reason] += 1


def _whole(results: Iterable[SessionResult], entries: list[Entry], seen: Seen) -> Iterator[list[SessionResult]]:
    """Each entry's sessions, as soon as all of them have come by. No session is in two entries."""
    wanted = {session_id: number for number, entry in enumerate(entries) for session_id in entry}
    missing = [len(entry) for entry in entries]
    held: dict[str, SessionResult] = {}
    total = left = len(wanted)
    for result in results if left else ():
        number = wanted.pop(result.session_id, None)
        if number is None:
            continue
        held[result.session_id] = result
        missing[number] -= 1
        if not missing[number]:
            yield [held.pop(session_id) for session_id in entries[number]]
        left -= 1
        seen("writing", total - left, total)
        if not left:
            break


def _manifest(done: Exported, kind: Kind, filters: Filters, split: Split) -> dict[str, Any]:
    return {
        **kind.to_json(),
        "filters": filters.to_json(),
        "split": {"seed": split.seed, "shares": dict(split.shares)},
        "rows": done.rows,
        "sessions": done.sessions,
        "seen": done.seen,
        "left_out": dict(sorted(done.left_out.items())),
        "files": done.splits,
    }
