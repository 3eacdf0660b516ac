"""Draw curves and bars as SVG, for a page that needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#2f6fde", "#d9580d", "#1c8f5f", "#a23db5", "#b8860b", "#c42b3b", "#4d5a6b", "#0f8a9d")
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 34
_BAR, _GAP, _NAMES = 16, 6, 150
_SPARK_WIDTH, _SPARK_HEIGHT = 120, 28
_TICKS = 5
LEAST = 1e-300
"""Is the least difference that an axis shows; of smaller ones parts are no numbers."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Names the points of a curve: x and y, both finite."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(curves: Sequence[Curve], x_label: str, *, from_zero: bool = False) -> str:
    """Draw curves over a common x axis; curves without points are left out. ``from_zero``: the y axis begins
    there.
    """
    curves = [curve for curve in curves if curve.points]
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if not xs:
        return ""
    ys += [0.0] if from_zero else []
    if max(ys) - min(ys) < LEAST:
        apart = abs(ys[0]) / 2 if abs(ys[0]) > LEAST else 0.5
        ys += [ys[0] - apart, ys[0] + apart]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x_low, x_high = min(*xs, x_ticks[0]), max(*xs, x_ticks[-1])
    x_high += 0.0 if x_high > x_low else max(1.0, abs(x_low) * 1e-3)
    y_low, y_high = min(*ys, y_ticks[0]), max(*ys, y_ticks[-1])

    def at(x: float, y: float) -> str:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = []
    for y in y_ticks:
        across, down = at(x_low, y).split(",")
        parts.append(f'<path class="grid" d="M{across} {down}H{_WIDTH - _RIGHT}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{float(down) + 4:.1f}" text-anchor="end">{label(y, y_ticks)}</text>'
        )
    for x in x_ticks:
        across = at(x, y_low).split(",")[0]
        parts.append(
            f'<text x="{across}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{label(x, x_ticks)}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 2}" text-anchor="middle">{escape(x_label)}</text>')
    for index, curve in enumerate(curves):
        color, last = COLORS[index % len(COLORS)], curve.points[-1]
        points = " ".join(at(x, y) for x, y in curve.points)
        title = f"<title>{escape(curve.name)}: {label(last[1])} at {label(last[0])}</title>"
        across, down = at(*last).split(",")
        parts.append(f'<polyline points="{points}" stroke="{color}">{title}</polyline>')
        parts.append(f'<circle cx="{across}" cy="{down}" r="2.5" fill="{color}">{title}</circle>')
    names = [curve.name for curve in curves] if len(curves) > 1 else []
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>{legend(names)}'


def bar_chart(rows: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], unit: str) -> str:
    """Draw a bar for each row, split into the named parts; rows without positive parts are left out."""
    rows = [(name, parts) for name, parts in rows if sum(max(0.0, parts.get(key, 0.0)) for key in names) > 0]
    if not rows:
        return ""
    longest = max(sum(max(0.0, parts.get(key, 0.0)) for key in names) for _, parts in rows)
    scale = (_WIDTH - _NAMES - 70) / longest
    drawn = []
    for index, (name, parts) in enumerate(rows):
        top, across = index * (_BAR + _GAP), float(_NAMES)
        drawn.append(
            f'<text x="{_NAMES - 6}" y="{top + _BAR - 4}" text-anchor="end">{escape(name[:24])}</text>'
        )
        for number, key in enumerate(names):
            value = max(0.0, parts.get(key, 0.0))
            drawn.append(
                f'<rect x="{across:.1f}" y="{top}" width="{value * scale:.1f}" height="{_BAR}" '
                f'fill="{COLORS[number % len(COLORS)]}">'
                f"<title>{escape(key)}: {label(value)} {escape(unit)}</title></rect>"
            )
            across += value * scale
        whole = sum(max(0.0, parts.get(key, 0.0)) for key in names)
        drawn.append(f'<text x="{across + 4:.1f}" y="{top + _BAR - 4}">{label(whole)} {escape(unit)}</text>')
    height = len(rows) * (_BAR + _GAP)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(drawn)}</svg>{legend(names)}'


def spark(values: Sequence[float]) -> str:
    """Draw finite values as a small curve without axes; return "" for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (_SPARK_HEIGHT - 4) / (high - low) if high - low > LEAST else 0.0
    step = (_SPARK_WIDTH - 4) / (len(values) - 1)
    points = " ".join(
        f"{2 + index * step:.1f},{_SPARK_HEIGHT - 2 - (value - low) * scale:.1f}"
        for index, value in enumerate(values)
    )
    title = f"<title>{label(values[0])} to {label(values[-1])}</title>"
    line = f'<polyline points="{points}" stroke="{COLORS[0]}">{title}</polyline>'
    return f'<svg class="spark" viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}" role="img">{line}</svg>'


def legend(names: Sequence[str]) -> str:
    """Write what the colors mean."""
    items = [
        f'<span><i style="background:{COLORS[index % len(COLORS)]}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    ]
    return f'<div class="legend">{"".join(items)}</div>' if items else ""


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from at most ``low`` to at least ``high``."""
    if not high > low:
        return [low]
    if high - low < LEAST:
        return [low, high]
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def label(value: float, among: Sequence[float] = ()) -> str:
    """Write a number shortly: `12.3k`, `0.0003`, `1e-07`; with as many digits as tell it from its neighbours
    ``among`` the ticks of an axis.
    """
    size = max(abs(value), *map(abs, among)) if among else abs(value)
    apart = abs(among[1] - among[0]) if len(among) > 1 else size
    digits = max(3, math.ceil(math.log10(size / apart)) + 2) if size > 0 and apart > 0 else 3
    if abs(value) < size * 1e-9:
        return "0"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor:
            return f"{value / factor:.{digits}g}{unit}"
    return f"{value:.{digits}g}"
