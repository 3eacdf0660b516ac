"""Test what `zlaunch watch` draws of a run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from zlaunch.view.live import draw
from zlaunch.view.progress import RunProgress


def drawn(*events: dict[str, Any], state: str = "running", now: float = 9.0) -> str:
    progress = RunProgress().take_all({"time": 1.0 + at, **event} for at, event in enumerate(events))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw(progress, "run", state, now))
    return console.export_text()


def metrics(**values: float) -> dict[str, Any]:
    return {"type": "metrics", "rank": 0, "host": "a", "values": values}


def test_losses_of_evaluations_are_curves() -> None:
    text = drawn(
        *(metrics(step=step, loss=2.0 - step, eval_loss=3.0 - step) for step in (0, 1)),
        metrics(step=1, val_loss=4.0, aux_loss=5.0, accuracy=0.5),
    )
    lines = [line.rstrip() for line in text.splitlines()]
    for curve in ("loss █▁ 1", "eval_loss █▁ 2", "val_loss ▁ 4"):
        assert any(line.split("  ")[0] == curve for line in lines), text
    assert "aux_loss" not in text, "the first three"
    assert "accuracy" not in text


def test_numbers_at_the_ends_of_what_a_float_holds() -> None:
    drawn(*(metrics(step=step, steps=5, loss=step * 1e-310) for step in range(5)))
    huge = {"all_ms": 1e299, "forward_ms": 1e299, "timed_steps": 1e299}
    assert "nan" not in drawn(metrics(step=1, **huge), metrics(step=2, **huge))


def test_a_total_that_is_an_epochs_is_called_so() -> None:
    events = [metrics(step=step, steps=32, of_epoch=1) for step in (1, 2)]
    assert "step 2 of 32 (epoch 1)" in drawn(*events) and "left in the epoch" in drawn(*events)
    assert "epoch" not in drawn(*(metrics(step=step, steps=32) for step in (1, 2)))
    own = metrics(step=3, steps=100)  # the script begins to report a total of its own
    assert "step 3 of 100" in drawn(*events, own) and "epoch" not in drawn(*events, own)


def test_what_was_reported_long_ago_is_called_so() -> None:
    events = [{**metrics(step=step, steps=9), "time": 100.0 + step} for step in (1, 2)]
    assert "step 2 of 9 · 4 s left" in drawn(*events, now=105.0)
    assert "step 2 of 9 as of 12 s ago" in drawn(*events, now=114.0) and "left" not in drawn(
        *events, now=114.0
    )
    assert "ago" not in drawn(*events, now=114.0, state="ended 0").splitlines()[0]


def test_a_run_on_another_host_grows_older_while_its_workers_start() -> None:
    start = {"type": "start", "attempt": 0}
    assert drawn(start, state="on n1").splitlines()[0].rstrip() == "run · on n1 · 8 s"
    assert "the workers are starting" in drawn(start, state="on n1")
    assert drawn(start, state="ended 0").splitlines()[0].rstrip() == "run · ended 0 · 0 s"
