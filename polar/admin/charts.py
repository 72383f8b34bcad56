"""Charts as SVG, made here: classes for colours, a title on each part, and a sentence for who cannot see them.

Shapes stretch with the page; words stand beside them as text, so that they stay readable on a phone. No styles inside:
what a class looks like stands in the style sheet, so that light and dark are one picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup, escape

from polar.admin.words import count, decimal, span

WIDTH, HEIGHT = 1000, 100
Ticks = Sequence[str]


@dataclass(frozen=True, slots=True)
class Bar:
    """One place of a chart over time: parts on top of each other."""

    label: str
    parts: tuple[tuple[str, float], ...]
    """(class, height) from the bottom."""


def stacked(bars: Sequence[Bar], says: str, ticks: Ticks) -> Markup:
    """Bars side by side, each of several parts."""
    top = _nice(max((sum(height for _, height in bar.parts) for bar in bars), default=0) or 1)
    step = WIDTH / max(len(bars), 1)
    shapes = []
    for place, bar in enumerate(bars):
        base = float(HEIGHT)
        for kind, height in bar.parts:
            tall = height / top * HEIGHT
            if tall <= 0:
                continue
            base -= tall
            shapes.append(
                f'<rect class="{kind}" x="{place * step + step * 0.1:.2f}" y="{base:.2f}" width="{step * 0.8:.2f}" '
                f'height="{tall:.2f}"><title>{escape(bar.label)}</title></rect>'
            )
    return _plot("".join(shapes), says, _scale(0.0, top), ticks)


def line(points: Sequence[tuple[float, float, str]], low: float, high: float, says: str, ticks: Ticks) -> Markup:
    """Points (place from 0 to 1, value, label), joined in their order."""
    reach = (high - low) or 1.0
    places = [(x * WIDTH, HEIGHT - (value - low) / reach * HEIGHT, label) for x, value, label in points]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    # A line without length and with round ends is a dot that no stretching makes an egg.
    dots = "".join(
        f'<path class="dot" d="M{x:.1f} {y:.1f}h0"><title>{escape(label)}</title></path>' for x, y, label in places
    )
    return _plot(f'<polyline class="line" points="{joined}"/>{dots}', says, _scale(low, high), ticks)


def histogram(counts: Sequence[int], low: float, high: float, says: str) -> Markup:
    """How many values there are in equal bins."""
    width = (high - low) / max(len(counts), 1)
    bars = []
    for number, found in enumerate(counts):
        begins = low + number * width
        bars.append(Bar(f"{decimal(begins)} to {decimal(begins + width)}: {found}", (("bar", float(found)),)))
    return stacked(bars, says, [decimal(low + (high - low) * part / 4, 2) for part in range(5)])


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a session's time, in seconds."""

    row: str
    kind: str
    """The class: waiting or the stage that ran."""
    start: float
    end: float
    label: str


def gantt(pieces: Sequence[Piece], rows: Sequence[str], seconds: float, says: str) -> Markup:
    """Rows of stretches on one scale."""
    scale = WIDTH / (seconds or 1.0)
    parts = []
    for name in rows:
        shapes = "".join(_stretch(piece, scale) for piece in pieces if piece.row == name)
        parts.append(
            f'<span class="what">{escape(name)}</span><svg viewBox="0 0 {WIDTH} 14" preserveAspectRatio="none" '
            f'aria-hidden="true">{shapes}</svg>'
        )
    ticks = "".join(f"<span>{span(seconds * part / 4) if part else '0'}</span>" for part in range(5))
    return Markup(
        f'<div class="gantt" role="img" aria-label="{escape(says)}">{"".join(parts)}'
        f'<span></span><div class="xs">{ticks}</div></div>'
    )


def _stretch(piece: Piece, scale: float) -> str:
    wide = max((piece.end - piece.start) * scale, 2.0)
    start = min(piece.start * scale, WIDTH - wide)
    return (
        f'<rect class="{piece.kind}" x="{start:.1f}" y="0" width="{wide:.1f}" height="14">'
        f"<title>{escape(piece.label)}</title></rect>"
    )


def strip(parts: Sequence[tuple[str, float, float, str]], here: tuple[float, float], says: str) -> Markup:
    """One thin row of (class, from, to, label), places from 0 to 1, with the part that is shown framed."""
    shapes = [f'<rect class="prompt" x="0" y="4" width="{WIDTH}" height="14"/>']
    for kind, start, end, label in parts:
        wide = max((end - start) * WIDTH, 0.6)
        shapes.append(
            f'<rect class="{kind}" x="{start * WIDTH:.2f}" y="4" width="{wide:.2f}" height="14">'
            f"<title>{escape(label)}</title></rect>"
        )
    wide = max((here[1] - here[0]) * WIDTH, 3)
    shapes.append(f'<rect class="here" x="{here[0] * WIDTH:.1f}" y="1" width="{wide:.1f}" height="20"/>')
    return Markup(
        f'<svg class="strip" viewBox="0 0 {WIDTH} 22" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(says)}">{"".join(shapes)}</svg>'
    )


def times(since: datetime, until: datetime) -> list[str]:
    """Five moments of a chart over time."""
    reach = until - since
    form = "%H:%M" if reach.total_seconds() <= 172_800 else "%d %b"
    return [(since + reach * part / 4).strftime(form) for part in range(5)]


def _plot(shapes: str, says: str, scale: Ticks, ticks: Ticks) -> Markup:
    lines = "".join(f'<path class="grid" d="M0 {y}H{WIDTH}"/>' for y in (0, HEIGHT / 2, HEIGHT))
    return Markup(
        f'<div class="plot" role="img" aria-label="{escape(says)}">'
        f'<div class="ys">{"".join(f"<span>{escape(each)}</span>" for each in scale)}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{lines}{shapes}</svg>'
        f'<span></span><div class="xs">{"".join(f"<span>{escape(each)}</span>" for each in ticks)}</div></div>'
    )


def _scale(low: float, high: float) -> list[str]:
    values = (high, (low + high) / 2, low)
    return [count(value) if high >= 10 and low == 0 else decimal(value, 2) for value in values]


def _nice(most: float) -> float:
    """A round number at or above it."""
    size = 1.0
    while size * 10 < most:
        size *= 10
    return next(base * size for base in (1, 2, 4, 6, 8, 10) if base * size >= most)
