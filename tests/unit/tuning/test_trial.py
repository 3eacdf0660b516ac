"""Test what a trial's events say about its speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from zlaunch.system.events import Event
from zlaunch.tuning.trial import StepTimes, TrialLimits, why_no_step
from zlaunch.tuning.variants import Variant

BATCH = 8
TOKENS = 128


def reports(seconds: Sequence[float], *, every: int = 1) -> list[Event]:
    """Return rank 0's reports of steps that took `seconds` each, one report per `every` steps."""
    events, now = [], 100.0
    for number, took in enumerate(seconds, start=1):
        now += took
        values = {"engine_step": number * every, "samples_per_s": every * BATCH / took}
        values |= {"tokens_per_s": TOKENS * values["samples_per_s"], "mfu": every * 0.01 / took}
        events.append({"type": "metrics", "rank": 0, "time": now, "values": values})
    return events


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(
    "seconds",
    [
        [3.0, 2.0, 0.1, 0.2, 0.4],
        [3.0, 2.0, 0.1, 0.2, 0.4, 0.9],  # an even number of timed steps: their median is a mean of two
        [3.0, 0.2, 0.4],  # too few steps
    ],
)
def test_samples_are_those_of_the_steps(seconds: list[float], every: int) -> None:
    watch = StepTimes(TrialLimits(warmup=1 * every, steps=3 * every, seconds=60.0))
    watch.take_all(reports(seconds, every=every))
    trial = watch.trial(Variant(), 0, 10.0)
    assert trial.is_ok and trial.steps_per_s > 1
    assert trial.samples_per_s == pytest.approx(BATCH * trial.steps_per_s)
    assert trial.tokens_per_s == pytest.approx(TOKENS * BATCH * trial.steps_per_s)
    assert trial.mfu == pytest.approx(0.01 * trial.steps_per_s)


def test_a_run_without_a_report_has_no_speed() -> None:
    watch = StepTimes(TrialLimits(warmup=1, steps=3, seconds=60.0))
    trial = watch.trial(Variant(), 0, 10.0)
    assert trial.without_a_step is not None and not trial.is_ok
    assert watch.trial(Variant(), 1, 10.0).verdict == "ended with exit code 1 after 0 steps"


@pytest.mark.parametrize(
    ("console", "why"),
    [
        (
            "zlaunch: loaded /a b/global_step4 (step 4, saved by 2 ranks at stage 2)\nno step is left\n",
            "it loaded /a b/global_step4 (step 4)",
        ),
        ("zlaunch: logs in runs/x\nno engine here\n\nzlaunch: done\n", 'it printed "no engine here" last'),
        ("zlaunch: logs in runs/x\n", "it printed nothing"),
    ],
)
def test_the_output_says_why_there_was_no_step(tmp_path: Path, console: str, why: str) -> None:
    (tmp_path / "console.log").write_text(console)
    assert why_no_step(tmp_path / "console.log") == why
