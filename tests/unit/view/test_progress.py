"""Test how a run is followed by its events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.view.progress import RunProgress, Series

VALUES = {
    **{"step": 10, "steps": 100, "loss": 2.0, "lr": 1e-3, "memory_gb": 0.5, "all_ms": 10.0},
    **{"forward_ms": 3.0, "backward_ms": 4.0, "step_ms": 1.0, "communication_ms": 2.0, "disk_ms": 0.0},
    "script_ms": 0.0,
}


def metrics(rank: int, when: float, **values: Any) -> dict[str, Any]:
    return {"type": "metrics", "rank": rank, "time": when, "values": {**VALUES, **values}, "host": "n1"}


def spawned(*ranks: int, at: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"type": "start", "attempt": 0, "hosts": ["n1"], "time": at},
        *({"type": "spawn", "rank": rank, "host": "n1", "pid": 7, "time": at} for rank in ranks),
    ]


def test_a_run() -> None:
    run = RunProgress().take_all([*spawned(0, 1), metrics(0, 11.0), metrics(1, 11.5, memory_gb=0.75)])
    assert (run.step, run.steps, run.seconds_left()) == (10, 100, None)
    run.take(metrics(0, 21.0, step=20, loss=1.5, val_loss=1.75))
    assert run.seconds_left() == 80.0  # a step takes a second
    assert (run.seconds_left(31.0), run.seconds_left(101.5)) == (70.0, None)
    assert run.series["loss"].shown() == [(10, 2.0), (20, 1.5)]
    assert run.series["val_loss"].shown() == [(20, 1.75)]
    assert run.ranks[1].peak_gb == 0.75 and run.ranks[0].state == "running"
    assert run.times()[0]["forward_ms"] == 3.0 and set(run.times()) == {0, 1}
    run.take({"type": "exit", "rank": 0, "returncode": 0, "host": "n1", "time": 30.0})
    run.take({"type": "exit", "rank": 1, "returncode": -9, "host": "n1", "time": 31.0})
    assert (run.ranks[0].state, run.ranks[1].state, run.last) == ("done", "SIGKILL", 31.0)


def test_what_a_script_reports_by_itself_belongs_to_the_last_step() -> None:
    run = RunProgress().take_all([*spawned(0), metrics(0, 11.0)])
    run.take({"type": "metrics", "rank": 0, "time": 12.0, "values": {"val_loss": 3.0}})
    assert run.series["val_loss"].shown() == [(10, 3.0)]


def test_a_restart() -> None:
    run = RunProgress().take_all([*spawned(0), metrics(0, 11.0), metrics(0, 12.0, step=11)])
    run.take({"type": "exception", "rank": 0, "exception": "ValueError: no", "time": 13.0})
    run.take({"type": "start", "attempt": 1, "hosts": ["n1"], "time": 14.0})
    assert (run.attempt, run.restarts, run.started) == (1, [14.0], 1.0)
    assert run.times() == {} and run.seconds_left() is None and not run.ranks and not run.failures


def test_a_lost_node_and_a_killed_rank() -> None:
    run = RunProgress().take_all(spawned(0, 1))
    run.take({"type": "exit", "rank": 0, "returncode": -9, "host": "n1", "reason": "by hand", "time": 3.0})
    run.take({"type": "lost", "host": "n1", "why": "fell silent", "time": 4.0})
    run.take({"type": "outcome", "errors": ["n1 fell silent", "hang: all"], "time": 5.0})
    assert run.ranks[1].state == "node lost"
    assert run.failures == ["rank 0 on n1: SIGKILL: by hand", "n1 fell silent", "hang: all"]


def test_the_first_failure_in_one_line() -> None:
    run = RunProgress()
    assert run.failure == ""
    hang = (
        "hang: no rank has written anything for 12 s\n  rank 1 on n1 is at x.py:6\n"
        "  rank 0 on n1 waits in all_reduce\n  what each was doing:\n  rank 0:\n    | Current thread"
    )
    run.take({"type": "outcome", "errors": [hang], "time": 5.0})
    assert run.failure == "hang: no rank has written anything for 12 s; rank 1 on n1 is at x.py:6"
    other = RunProgress().take_all(spawned(0))
    other.take({"type": "exception", "rank": 0, "exception": "ValueError: a\nb", "time": 6.0})
    assert other.failure == "rank 0: ValueError: a"
    assert RunProgress().take_all([{"type": "error", "message": "", "time": 1.0}]).failure == ""


def test_what_is_no_number_is_left_out() -> None:
    run = RunProgress().take_all(
        [*spawned(0), metrics(0, 11.0), metrics(0, 12.0, loss=float("nan"), lr=10**400)]
    )
    assert run.series["loss"].shown() == [(10, 2.0)] and "loss" not in run.ranks[0].values
    assert "lr" not in run.ranks[0].values


def test_times_are_weighted_by_their_steps() -> None:
    run = RunProgress().take_all([*spawned(0), metrics(0, 11.0, timed_steps=9)])
    run.take(metrics(0, 12.0, timed_steps=1, forward_ms=103.0, all_ms=110.0))
    assert run.times()[0]["forward_ms"] == 13.0


JUNK: Any = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("type", "rank", "time", "values", "attempt", "host", "returncode", "tag")
KINDS = ("metrics", "start", "spawn", "exit", "exception", "lost", "error", "checkpoint")


@given(
    st.lists(
        st.dictionaries(st.sampled_from(NAMES), JUNK | st.sampled_from(KINDS), max_size=8)
        | st.fixed_dictionaries(
            {
                "type": st.sampled_from(KINDS),
                "rank": st.integers(0, 3),
                "time": st.floats(0, 1e9),
                "values": JUNK,
            }
        ),
        max_size=8,
    )
)
def test_junk_changes_nothing_and_never_raises(events: list[dict[str, Any]]) -> None:
    run = RunProgress().take_all(events)
    assert run.seconds_left() is None or run.seconds_left() is not None
    run.times()


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=5000))
def test_a_series_keeps_its_mean(points: list[tuple[float, float]]) -> None:
    series = Series()
    for x, y in points:
        series.add(x, y)
    shown = series.shown()
    assert 1 <= len(shown) <= 1001
    if len(points) < 1000:
        assert shown == points
    low, high = min(y for _, y in points), max(y for _, y in points)
    assert all(low - 1e-3 <= y <= high + 1e-3 for _, y in shown)


def test_a_long_series_has_its_ends() -> None:
    series = Series()
    for x in range(100_000):
        series.add(x, 2.0 * x)
    shown = series.shown()
    assert shown[0][0] < 200 and shown[-1][0] > 99_800
    assert all(y == pytest.approx(2 * x) for x, y in shown)
