"""How `polar replay --regenerate` shows where an engine leaves what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from polar.cli.client import console
from polar.errors import SpecError
from polar.regeneration import Choice, Regenerated
from polar.renderers import for_folder

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a session beside the other engine."""

    session_id: str
    found: Regenerated
    decode: Decode

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the text of what differs."""
        found = self.found
        texts = {
            "before_text": self._text(found.before),
            "recorded_text": self._text(_ids(found.recorded)),
            "other_text": self._text(_ids(found.other)),
        }
        return {"session_id": self.session_id, **found.to_json(), **texts}

    def _text(self, ids: list[int] | None) -> str | None:
        return None if ids is None else self.decode(ids)


def decoder(tokenizer: str | None, model: str) -> Decode:
    """Text of ids by the engine's tokenizer, if its folder is on this machine; else the ids themselves."""
    if tokenizer and Path(tokenizer).is_dir():
        try:
            return for_folder(Path(tokenizer), model=model).decode
        except SpecError:
            return str
    return str


def show_regenerated(asked: list[Asked], as_json: bool) -> None:
    """A table, or JSON. Exits 1 if an answer differs, or if none could be compared."""
    compared = [each.found for each in asked if each.found.same is not None]
    differ = [found for found in compared if not found.same]
    overall = {"calls": len(asked), "compared": len(compared), "differ": len(differ)}
    if as_json:
        click.echo(json.dumps({"calls": [each.to_json() for each in asked], "overall": overall}))
    else:
        console.print(_table(asked))
        console.print(f"{len(differ)} of {len(compared)} answers differ" + _unasked(asked))
    if differ or not compared:
        raise SystemExit(1)


def _unasked(asked: list[Asked]) -> str:
    reasons = [each.found.reason for each in asked if each.found.reason]
    return f"; {len(reasons)} not asked: {reasons[0]}" if reasons else ""


def _table(asked: list[Asked]) -> Table:
    table = Table("session", "call", "tokens", "asked", "differs at", "after", "recorded", "instead", "mean difference")
    for each in asked:
        found = each.found
        mean = "–" if found.mean_difference is None else f"{found.mean_difference:.2g}"
        start = (each.session_id[4:12], str(found.turn), str(found.tokens), found.asked or found.reason or "")
        if found.same is not False:
            table.add_row(*start, "nowhere" if found.same else "–", "", "", "", mean)
            continue
        recorded = _token(each.decode, found.recorded)
        if found.recorded_by_other is not None:
            recorded += f", to it {found.recorded_by_other:.2f}"
        other = _token(each.decode, found.other)
        after = escape("…" + repr(each.decode(found.before or []))[-24:])
        table.add_row(*start, str(found.position), after, recorded, other, mean)
    return table


def _token(decode: Decode, choice: Choice | None) -> str:
    if choice is None or choice.id is None:
        return "(the end)"
    logprob = "" if choice.logprob is None else f" {choice.logprob:.2f}"
    return escape(repr(decode([choice.id]))) + logprob


def _ids(choice: Choice | None) -> list[int] | None:
    return None if choice is None or choice.id is None else [choice.id]
