"""Test curves and bars, and the picture in a terminal."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.unit.view.test_progress import metrics, spawned
from zlaunch.view.live import draw, sparkline
from zlaunch.view.page import Curve, RunPage, bar_chart, label, line_chart, page_body, ticks
from zlaunch.view.progress import RunProgress, span

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


@given(st.lists(st.lists(st.tuples(FINITE, FINITE), max_size=20), max_size=4), st.booleans())
def test_curves_lie_inside_of_their_chart(curves: list[list[tuple[float, float]]], from_zero: bool) -> None:
    drawn = line_chart(
        [Curve(f"<{index}>", points) for index, points in enumerate(curves)], "x & y", from_zero=from_zero
    )
    if not any(curves):
        assert drawn == ""
        return
    svg = ET.fromstring(f"<div>{drawn}</div>")[0]
    width, height = map(float, svg.get("viewBox", "").split()[2:])
    lines = svg.findall("polyline")
    assert len(lines) == sum(1 for points in curves if points)
    for line in lines:
        for point in line.get("points", "").split():
            x, y = map(float, point.split(","))
            assert -0.1 <= x <= width + 0.1 and -0.1 <= y <= height + 0.1


@given(FINITE, FINITE)
def test_ticks_span_the_range(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    found = ticks(low, high)
    assert 1 <= len(found) <= 9
    if high > low:
        slack = (high - low) * 1e-6 + abs(high) * 1e-9 + abs(low) * 1e-9
        assert found[0] <= low + slack and found[-1] >= high - slack


def test_bars() -> None:
    rows = [("rank 0", {"a": 1.0, "b": 3.0}), ("<rank 1>", {"a": 2.0, "b": -1.0}), ("none", {})]
    svg = ET.fromstring(f"<div>{bar_chart(rows, ('a', 'b'), 'ms')}</div>")[0]
    widths = [float(bar.get("width", "")) for bar in svg.findall("rect")]
    assert len(widths) == 4 and widths[1] == 3 * widths[0] and widths[3] == 0.0
    assert bar_chart([("none", {})], ("a",), "ms") == ""


def test_labels() -> None:
    numbers = (0.0, 12345.0, -2e9, 3e-4, 1e-7, 1.5e6)
    assert [label(x) for x in numbers] == ["0", "12.3k", "-2G", "0.0003", "1e-07", "1.5M"]
    assert [label(x, [2.3001, 2.3002, 2.3003]) for x in (2.3001, 2.3002)] == ["2.3001", "2.3002"]
    steps = [1234100.0, 1234200.0]
    assert [label(x, steps) for x in steps] == ["1.2341M", "1.2342M"]


def test_spans_and_sparklines() -> None:
    assert [span(s) for s in (4.9, 192, 18120)] == ["4 s", "3 min 12 s", "5 h 02 min"]
    assert sparkline([0, 1, 2, 7], 40) == "▁▂▃█" and sparkline([3.0], 10) == "▁"
    assert len(sparkline(list(range(1000)), 40)) == 40


def test_the_picture_of_a_run() -> None:
    run = RunProgress().take_all(
        [*spawned(0, 1), metrics(0, 11.0), metrics(1, 11.0), metrics(0, 21.0, step=20, skipped_steps=2)]
    )
    run.take({"type": "error", "message": "[bold] the disk is full", "time": 22.0})
    console = Console(file=io.StringIO(), width=120)
    console.print(draw(run, "runs/[a]", "running", 23.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO from above
    for part in (
        "runs/[a] · running · 22 s · step 20 of 100 · 1 min 18 s left",
        "step 20/100 loss 2 lr 1.0e-03",
        "2 steps skipped for overflows",
        "forward 3 ms",
        "0.50 GB",
        "[bold] the disk is full",
        "computation bounds the step",
    ):
        assert part in text, text


def test_losses_share_a_chart_and_the_load_of_experts_has_its_own() -> None:
    values = {"loss": 2.0, "val_loss": 2.5, "expert_max_load": 1.25, "balance_loss": 2.1, "mine": 1.0}
    run = RunProgress().take_all([*spawned(0), *(metrics(0, 9.0 + n, step=n, **values) for n in (1, 2))])
    cards = page_body([RunPage("a", (), run, {})]).split('<div class="card">')
    titles = [card.partition("</h3>")[0].removeprefix("<h3>") for card in cards]
    losses = cards[titles.index("Loss")]
    assert "val_loss" in losses and "balance_loss" not in losses
    assert "Balance loss" in titles and "mine" in titles
    assert "expert_max_load" in cards[titles.index("Largest load of an expert (1: all are equal)")]
    assert len(titles) == len(set(titles))
