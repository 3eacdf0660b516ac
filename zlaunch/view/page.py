"""Write the page of one run or several: one HTML file, without scripts and without a network."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from zlaunch.view.bottleneck import bottleneck_of
from zlaunch.view.differences import find_differences, flat_config, named_arguments
from zlaunch.view.progress import TIMES, RunProgress, span

# -- charts -----------------------------------------------------------------------------------------
#
# Draw curves and bars as SVG, for a page that needs no network.


COLORS = ("#2f6fde", "#d9580d", "#1c8f5f", "#a23db5", "#b8860b", "#c42b3b", "#4d5a6b", "#0f8a9d")
_WIDTH = 560
_HEIGHT = 260
_LEFT = 62
_RIGHT = 12
_TOP = 12
_BOTTOM = 34
_BAR = 16
_GAP = 6
_NAMES = 150
_SPARK_WIDTH = 120
_SPARK_HEIGHT = 28
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
    x_ticks = ticks(min(xs), max(xs))
    y_ticks = ticks(min(ys), max(ys))
    x_low = min(*xs, x_ticks[0])
    x_high = max(*xs, x_ticks[-1])
    x_high += 0.0 if x_high > x_low else max(1.0, abs(x_low) * 1e-3)
    y_low = min(*ys, y_ticks[0])
    y_high = max(*ys, y_ticks[-1])

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
        color = COLORS[index % len(COLORS)]
        last = curve.points[-1]
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
        top = index * (_BAR + _GAP)
        across = float(_NAMES)
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
    low = min(values)
    high = max(values)
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
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
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


# -- page -------------------------------------------------------------------------------------------


STYLE = """
:root{color-scheme:light dark;--fg:#1d232b;--bg:#fff;--soft:#6a7480;--line:#dfe3e8;--card:#f7f8fa}
@media(prefers-color-scheme:dark){:root{--fg:#e6e9ee;--bg:#14181d;--soft:#98a2ae;--line:#303842;
--card:#1b2027}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);margin:2rem auto;
max-width:1220px;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:1.8rem 0 .6rem}
h3{font-size:.95rem;margin:0 0 .4rem}
.soft,svg text{color:var(--soft);fill:var(--soft)}.verdict{font-size:1.15rem;padding:.7rem 1rem;
background:var(--card);border-left:4px solid #2f6fde;margin:1rem 0}.bad{border-color:#c42b3b}
.grid-of-charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(460px,100%),1fr));gap:1rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.8rem}
svg{width:100%;height:auto;font-size:11px}.grid{stroke:var(--line);fill:none}polyline{fill:none;stroke-width:1.8}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}.legend i{display:inline-block;width:.8em;
height:.8em;border-radius:2px;margin-right:.35em}
table{border-collapse:collapse;font-size:.9rem}td,th{text-align:left;padding:.15rem 1rem .15rem 0;
border-bottom:1px solid var(--line);vertical-align:top}pre{overflow:auto;background:var(--card);padding:.8rem;
font-size:.82rem;border:1px solid var(--line);border-radius:8px}
.wide{overflow-x:auto;margin:.6rem 0}.wide td{overflow-wrap:anywhere;min-width:8em}
@media(max-width:760px){svg{font-size:15px;overflow:visible}}
"""
_CHARTS = (
    ("Speed", ("tokens_per_s", "samples_per_s")),
    ("TFLOPS of rank 0", ("tflops",)),
    ("Learning rate", ("lr",)),
    ("Gradient norm", ("grad_norm",)),
    ("Loss scale", ("loss_scale",)),
    ("Skipped steps", ("skipped_steps",)),
    ("Largest load of an expert (1: all are equal)", ("expert_max_load",)),
    ("Experts without tokens", ("unused_experts",)),
    ("Dropped share of tokens", ("dropped_tokens",)),
    ("Balance loss", ("balance_loss",)),
)
_KNOWN = {"loss", "memory_gb", "host_gb", "all_ms", *TIMES, *(name for _, names in _CHARTS for name in names)}
_MOST_CURVES = 8


@dataclass(frozen=True, slots=True)
class RunPage:
    """Holds what the page shows of one run."""

    name: str
    facts: Sequence[tuple[str, str]]
    """Rows such as command, hosts, start, end."""
    progress: RunProgress
    config: Mapping[str, Any]
    """The effective config; empty where the run has written none."""
    failures: Sequence[str] = ()
    """Lists tracebacks and reasons, those of attempts before the last one too."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()
    """The words behind `zlaunch`."""
    failure: str = ""
    """The first failure of the last attempt in one line; empty where it had none."""


def write_page(runs: Sequence[RunPage]) -> str:
    """Return the page's HTML. With several runs their curves are drawn in the same charts."""
    title = " and ".join(run.name for run in runs)
    written = f"written by zlaunch report, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    body = f'<h1>{escape(title)}</h1><div class="soft">{written}</div>{page_body(runs)}'
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html><html lang="en"><head>{head}{view}</head><body>{body}</body></html>\n'


def page_body(runs: Sequence[RunPage]) -> str:
    """Return the HTML below the title: what bounds the step, what differs between several runs, curves, and
    the details of each run.
    """
    body = [_verdict(run, named=len(runs) > 1) for run in runs]
    body += _differences(runs) if len(runs) > 1 else []
    body.append(f'<h2>Curves</h2><div class="grid-of-charts">{"".join(_curves(runs))}</div>')
    for run in runs:
        body += _details(run, named=len(runs) > 1)
    return "".join(body)


def _verdict(run: RunPage, *, named: bool) -> str:
    found = bottleneck_of(run.progress)
    sentence = found.sentence if found is not None else "no step has been reported with its times"
    before = f"{run.name}: " if named else ""
    bad = " bad" if run.progress.failures else ""
    return f'<div class="verdict{bad}">{escape(before + sentence)}</div>'


def _differences(runs: Sequence[RunPage]) -> list[str]:
    """Return the table of what differs; long values in cells that scroll with it."""
    parts = []
    sides = (
        ("Arguments", [named_arguments(run.command) for run in runs]),
        ("Config", [flat_config(run.config) for run in runs]),
        ("Environment", [flat_config(_without_limits(run.environment)) for run in runs]),
    )
    for title, values in sides:
        if rows := find_differences(values):
            header = (title, *(run.name for run in runs))
            parts.append(f'<div class="wide">{_table([header, *rows], header=True)}</div>')
    found = "".join(parts) or "<p>The arguments, the config and the environment are the same.</p>"
    return [f"<h2>Differences</h2>{found}"]


def _without_limits(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the speeds that each run has measured: they differ always."""
    return {name: value for name, value in environment.items() if name != "limits"}


def _curves(runs: Sequence[RunPage]) -> list[str]:
    named = len(runs) > 1
    names = {name for run in runs for name in run.progress.series}
    losses = sorted(name for name in names - (_KNOWN - {"loss"}) if "loss" in name)
    others = sorted(names - _KNOWN - set(losses))
    charts = [("Loss", tuple(sorted(losses, key=lambda name: name != "loss"))), *_CHARTS]
    charts += [(name, (name,)) for name in others]
    cards = []
    for title, shown in charts:
        curves = _of_names(runs, shown, named=named)
        cards.append(_card(title, line_chart(curves, "step", from_zero=title == "Speed")))
    memory = []
    for run in runs:
        ranks = sorted(run.progress.memory)
        before = f"{run.name}, " if named else ""
        memory += [Curve(f"{before}rank {rank}", run.progress.memory[rank].shown()) for rank in ranks]
    left = len(memory) - _MOST_CURVES
    more = f'<div class="soft">and {left} more ranks: the table has them</div>' if left > 0 else ""
    cards.append(
        _card("Memory of a rank, GB", line_chart(memory[:_MOST_CURVES], "minutes", from_zero=True) + more)
    )
    parts = [name.removesuffix("_ms") for name in TIMES]
    for run in runs:
        rows = [
            (
                f"rank {rank} {run.progress.ranks[rank].host}",
                {n.removesuffix("_ms"): v for n, v in each.items()},
            )
            for rank, each in list(run.progress.times().items())[: _MOST_CURVES * 2]
        ]
        before = f"{run.name}: t" if named else "T"
        cards.append(_card(f"{before}ime of a step by rank, last steps", bar_chart(rows, parts, "ms")))
    return [card for card in cards if card]


def _of_names(runs: Sequence[RunPage], names: Sequence[str], *, named: bool) -> list[Curve]:
    """Return the curves of one chart. Of speed, the first name that a run has: tokens, else samples."""
    found = []
    for run in runs:
        there = [name for name in names if name in run.progress.series]
        if names == _CHARTS[0][1]:
            there = there[:1]
        for name in there:
            shown = name.replace("_per_s", " a second")
            label = f"{run.name}: {shown}" if named else shown
            found.append(Curve(label, run.progress.series[name].shown()))
    return found


def _card(title: str, chart: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3>{chart}</div>' if "<svg" in chart else ""


def _details(run: RunPage, *, named: bool) -> list[str]:
    parts = [f"<h2>{escape('Run ' + run.name if named else 'Run')}</h2>", _table(run.facts)]
    if run.failures:
        parts.append("<h3>What went wrong</h3>")
        parts += [f"<pre>{escape(text)}</pre>" for text in run.failures]
    if run.progress.restarts:
        times = ", ".join(span(when - run.progress.started) for when in run.progress.restarts)
        parts.append(f"<p>Restarted after {escape(times)}.</p>")
    rows = [("rank", "host", "state", "largest memory", "step", "waits for others")]
    for rank, known in sorted(run.progress.ranks.items()):
        each = known.times()
        step = (f"{each['all_ms']:.4g} ms", f"{each['communication_ms']:.4g} ms") if each else ("", "")
        memory = f"{known.peak_gb:.2f} GB" if known.peak_gb else ""
        rows.append((str(rank), known.host, known.state, memory, *step))
    parts += ["<h3>Ranks</h3>", _table(rows, header=True)]
    for title, values in (("Environment", run.environment), ("Effective config", run.config)):
        if values:
            text = escape(json.dumps(values, indent=1))
            parts.append(f"<details><summary>{title}</summary><pre>{text}</pre></details>")
    return parts


def _table(rows: Sequence[Sequence[str]], *, header: bool = False) -> str:
    drawn = []
    for index, row in enumerate(rows):
        cell = "th" if header and index == 0 else "td"
        drawn.append("<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>")
    return f"<table>{''.join(drawn)}</table>"
