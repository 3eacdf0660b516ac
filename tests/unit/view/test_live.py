"""Test what `zlaunch watch` draws of a run."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from zlaunch.view.live import draw
from zlaunch.view.progress import RunProgress


def drawn(*events: dict[str, Any]) -> str:
    progress = RunProgress().take_all({"time": 1.0 + at, **event} for at, event in enumerate(events))
    console = Console(width=120, record=True, quiet=True)
    console.print(draw(progress, "run", "running", 9.0))
    return console.export_text()


def metrics(**values: float) -> dict[str, Any]:
    return {"type": "metrics", "rank": 0, "host": "a", "values": values}


def test_losses_of_evaluations_are_curves() -> None:
    text = drawn(
        *(metrics(step=step, loss=2.0 - step, eval_loss=3.0 - step) for step in (0, 1)),
        metrics(step=1, val_loss=4.0, aux_loss=5.0, accuracy=0.5),
    )
    assert "loss ▁" not in text and "loss █▁ 1\n" in text and "eval_loss █▁ 2\n" in text
    assert "val_loss ▁ 4\n" in text and "aux_loss" not in text, "the first three"
    assert "accuracy" not in text
