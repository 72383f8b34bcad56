"""How values are written on the pages: times, numbers, states, and texts that somebody else wrote.

What an agent or a harness wrote is shown, never obeyed: characters that a reader does not see, or that turn the text
around, are written out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import orjson
from flask import Blueprint
from markupsafe import Markup, escape

from polar.models import now

CLIP = 6000
"""Characters of one text that are shown before the link to all of it."""
UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
MARKS = {
    "queued": "○",
    "running": "◐",
    "completed": "✓",
    "failed": "✕",
    "timed_out": "⧗",
    "cancelled": "⊘",
}
"""A sign beside each word of a state, so that none is told by its colour alone."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def ago(moment: datetime | None) -> Markup:
    """How long ago, with the moment itself for who points at it."""
    if moment is None:
        return Markup("–")
    seconds = (now() - moment).total_seconds()
    told = "now" if 0 <= seconds < 1 else f"{span(abs(seconds))} ago" if seconds >= 0 else f"in {span(-seconds)}"
    utc = moment.astimezone(UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        utc.isoformat(timespec="milliseconds"), utc.strftime("%Y-%m-%d %H:%M:%S UTC"), told
    )


def span(seconds: float | None) -> str:
    """A length of time in its largest unit."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for size, unit in UNITS:
        if seconds >= size:
            rest = seconds / size
            return f"{rest:.1f} {unit}" if rest < 10 else f"{rest:.0f} {unit}"
    return f"{seconds:.0f} s"


def milliseconds(value: object) -> str:
    """The same of milliseconds."""
    return span(value / 1000) if isinstance(value, int | float) else "–"


def count(value: object) -> str:
    """A whole number with its thousands apart; a dash for what is none."""
    return f"{int(value):,}".replace(",", "\u202f") if isinstance(value, int | float | Decimal) else "–"


def decimal(value: object, digits: int = 3) -> str:
    """A number of a reward: as many digits as say something; a dash for what is none."""
    if not isinstance(value, int | float | Decimal):
        return "–"
    shown = f"{value:.{digits}f}".rstrip("0").rstrip(".")
    return (shown if shown not in ("-0", "") else "0").replace("-", "\u2212")


def visible(value: object) -> Markup:
    """A text in which nothing hides: escaped, with unseen characters and those that turn it around written out."""
    return Markup(UNSEEN.sub(_written_out, str(escape(str(value)))))


def _written_out(found: re.Match[str]) -> str:
    number = ord(found[0])
    sign = chr(0x2400 + number) if number < 32 else f"U+{number:04X}"
    return f'<span class="unseen" title="U+{number:04X}">{sign}</span>'


def clipped(value: object, length: int = CLIP) -> Markup:
    """The beginning of a text."""
    return visible(str(value)[:length])


def pretty(value: Any) -> str:
    """JSON for people."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS, default=str).decode()


def arguments(value: object) -> str:
    """A tool call's arguments, spread out where they are JSON."""
    try:
        parsed = orjson.loads(str(value))
    except orjson.JSONDecodeError:
        return str(value)
    return pretty(parsed) if isinstance(parsed, dict | list) else str(value)


def state(value: str) -> Markup:
    """A state with its sign."""
    word = value.replace("_", " ")
    return Markup('<span class="state {}"><i aria-hidden="true">{}</i>{}</span>').format(
        value, MARKS.get(value, "•"), word
    )


def short(value: str) -> str:
    """The part of an id by which people tell it."""
    head, _, rest = value.partition("-")
    return f"{head}-{rest[:8]}" if head in ("ses", "cmp") and len(rest) > 8 else value


def text_of(content: Any) -> str:
    """The text of a message's content, however it is written."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping) and "text" in part)
    return pretty(content)


def pictures_of(content: Any) -> list[str]:
    """The digests of the pictures in a message's content."""
    parts = content if isinstance(content, list) else []
    urls = [str((part.get("image_url") or {}).get("url", "")) for part in parts if isinstance(part, Mapping)]
    return [url.removeprefix("polar-media:") for url in urls if url.startswith("polar-media:")]


def prepare(blueprint: Blueprint) -> None:
    """Give the templates these words."""
    filters = (ago, span, milliseconds, count, decimal, visible, clipped, pretty, arguments, state, short, text_of)
    for each in (*filters, pictures_of):
        blueprint.add_app_template_filter(each)
    blueprint.add_app_template_global(now, "moment")
