"""Every token of a trace, a page at a time: what it says, whether it is trained, how likely it was, who sampled it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from flask import request
from markupsafe import Markup, escape
from sqlalchemy.exc import NoResultFound

from polar import listing, queries, slices
from polar.admin import charts
from polar.admin.decoding import Texts, texts_for
from polar.admin.page import blueprint, chosen, database, page, whole
from polar.admin.words import UNSEEN, count, visible
from polar.errors import NotFoundError
from polar.slices import Stretch

SIZES = (250, 1000, 4000)
COLOURS = ("mask", "logprob", "version")
STEPS = ((-0.105, "0"), (-0.693, "1"), (-2.303, "2"), (-4.605, "3"), (-math.inf, "4"))
"""Log-probabilities from which on a token has each shade: 90 %, 50 %, 10 %, 1 %, less."""
TINTS = 6
"""Colours that policy versions take in turn."""
BINS = 400
"""Parts of the strip."""
MAX_STARTS = 400
"""Beginnings of calls that the strip and the list name."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token as the page shows it."""

    place: int
    id: int
    text: str | None
    trained: bool
    prompt: bool
    logprob: float | None
    version: str | None
    tint: int | None
    starts: str | None
    """The call that begins to be sampled here."""

    @property
    def shade(self) -> str:
        """How unlikely it was, in five steps; empty where that is not known."""
        if self.logprob is None or not self.trained:
            return ""
        return next(step for bound, step in STEPS if self.logprob >= bound or bound == -math.inf)


@blueprint.get("/sessions/<session_id>/traces/<int:number>")
@page("admin/tokens.html")
def tokens(session_id: str, number: int) -> dict[str, Any]:
    """The page."""
    size = whole("size", 1000, SIZES[0], SIZES[-1])
    with database() as db:
        row = queries.session(db, session_id)
        traces = listing.traces_of(db, [session_id]).get(session_id, [])
        trace = next((each for each in traces if each.number == number), None)
        if trace is None:
            raise NotFoundError(f"session {session_id} has no trace {number}")
        try:
            found = slices.stretch(db, session_id, number, whole("from", 0), size)
        except NoResultFound as error:
            raise NotFoundError(f"session {session_id} has no trace {number}") from error
        mask = slices.mask_of(db, session_id, number)
        metadata = slices.body_of(db, session_id, number).get("metadata") or {}
        texts = texts_for(db, row.lane)
    lines = [line for line in metadata.get("completion_metadata") or [] if line.get("start") is not None]
    total = found.prompt_tokens + found.response_tokens
    shown = _tokens(found, texts, trace.certificate.get("policy_versions") or [], lines)
    table = chosen("view", ("table",)) == "table"
    return {
        "session": row,
        "trace": trace,
        "traces": traces,
        "start": found.start,
        "end": found.start + len(shown),
        "total": total,
        "trained_from": found.prompt_tokens + int(mask.argmax()) if mask.any() else None,
        "size": size,
        "sizes": SIZES,
        "colour": chosen("colour", COLOURS, "mask"),
        "colours": COLOURS,
        "table": table,
        "tokens": shown if table else [],
        "stream": None if table else _stream(shown),
        "strip": _strip(found, mask, lines, len(shown)),
        "calls": lines[:MAX_STARTS],
        "decoded": texts is not None,
        "versions": _versions(trace.certificate.get("policy_versions") or []),
        "focus": request.args.get("from"),
    }


def _versions(spans: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Each version once, with its colour."""
    names = dict.fromkeys(str(span.get("version")) for span in spans)
    return [(name, number % TINTS) for number, name in enumerate(names)]


def _tokens(
    found: Stretch, texts: Texts | None, spans: list[dict[str, Any]], lines: list[dict[str, Any]]
) -> list[Token]:
    ids = found.ids.tolist()
    words: list[str | None] = list(texts(ids)) if texts else [None] * len(ids)
    tints = dict(_versions(spans))
    versions: list[str | None] = [None] * len(ids)
    shift = found.start - found.prompt_tokens
    for span in spans:
        first, last = max(int(span["start"]) - shift, 0), min(int(span["end"]) - shift, len(ids))
        if first < last:
            versions[first:last] = [str(span.get("version"))] * (last - first)
    starts = {int(line["start"]) + found.prompt_tokens: str(line["completion_id"]) for line in lines}
    mask = found.mask.astype(bool).tolist()
    logprobs = found.logprobs.tolist() if found.logprobs is not None else [None] * len(ids)
    shown = []
    for offset, token in enumerate(ids):
        place, version = found.start + offset, versions[offset]
        trained, logprob = mask[offset], logprobs[offset]
        shown.append(
            Token(
                place,
                token,
                words[offset],
                trained,
                place < found.prompt_tokens,
                logprob if trained and logprob is not None and math.isfinite(logprob) else None,
                version if trained else None,
                tints.get(version) if trained and version is not None else None,
                starts.get(place),
            )
        )
    return shown


def says(token: Token) -> str:
    """A token in words."""
    told = [f"#{token.place}", f"id {token.id}"]
    told.append("prompt" if token.prompt else "sampled, trained" if token.trained else "context")
    if token.logprob is not None:
        told.append(f"log-probability {token.logprob:.4f} ({math.exp(min(token.logprob, 0)):.2%})")
    if token.version is not None:
        told.append(f"policy {token.version}")
    return " · ".join(told)


def _stream(shown: list[Token]) -> Markup:
    """The tokens in a row. Put together here: a template takes ten times as long for thousands of them."""
    parts = []
    for token in shown:
        kinds = ["t", "on" if token.trained else "p" if token.prompt else "c"]
        if token.shade:
            kinds.append(f"s{token.shade}")
        if token.tint is not None:
            kinds.append(f"v{token.tint}")
        if token.starts:
            kinds.append("begin")
        text = f"{token.id} " if token.text is None else token.text
        inside = escape(text) if not UNSEEN.search(text) else visible(text)
        lines = str(inside).replace("\n", '<span class="nl">⏎</span>\n')
        parts.append(f'<span class="{" ".join(kinds)}" title="{escape(says(token))}">{lines}</span>')
    return Markup("".join(parts))


def _strip(found: Stretch, mask: Any, lines: list[dict[str, Any]], length: int) -> Markup:
    """Where in the stream tokens are trained, and which part is shown."""
    total = max(found.prompt_tokens + found.response_tokens, 1)
    whole_mask = np.concatenate([np.zeros(found.prompt_tokens, np.uint8), mask])
    edges = np.linspace(0, len(whole_mask), min(BINS, max(len(whole_mask), 1)) + 1).astype(int)
    sums = np.concatenate([[0], np.cumsum(whole_mask, dtype=np.int64)])
    parts: list[tuple[str, int, int]] = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        share = (sums[high] - sums[low]) / max(high - low, 1)
        kind = f"on share{min(int(share * 4), 3)}"
        if share > 0 and parts and parts[-1][0] == kind and parts[-1][2] == low:
            parts[-1] = (kind, parts[-1][1], high)  # one shape: between two, a seam would be seen
        elif share > 0:
            parts.append((kind, low, high))
    shapes = [(kind, low / total, high / total, f"trained, {low} to {high}") for kind, low, high in parts]
    here = (found.start / total, (found.start + length) / total)
    trained = int(sums[-1])
    told = f"{count(total)} tokens, {count(trained)} trained in {len(lines)} calls; shown from {found.start}"
    return charts.strip(shapes, here, told)
