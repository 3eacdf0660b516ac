"""Test timers that scripts written for DeepSpeed make for their own parts."""

from __future__ import annotations

import time
from typing import Any

import pytest


def _wait(seconds: float) -> None:
    begin = time.time()
    while time.time() < begin + seconds:
        pass


def test_times_are_summed_until_they_are_read(deepspeed: Any) -> None:
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timers = SynchronizedWallClockTimer()
    timer = timers("forward")
    assert timers("forward") is timer and timers.get_timers() == {"forward": timer}
    begin = time.time()
    for _ in range(3):
        timer.start()
        _wait(0.001)
        timer.stop()
    wall = (time.time() - begin) * 1000
    assert 3 <= timer.elapsed(reset=False) <= wall
    assert len(timer.elapsed_records) == 3 and 1 <= timer.mean() <= wall
    assert timers.get_mean(["forward", "backward"]) == {"forward": timer.mean() * 1000}
    timer.start()
    assert timer.elapsed() >= 3 and timer.started_  # reading does not stop it
    timer.stop()
    timer.reset()
    assert timer.elapsed() == 0 == timer.mean()


def test_a_mean_leaves_out_the_extremes(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timer = SynchronizedWallClockTimer()("step")
    now = 0.0
    monkeypatch.setattr(time, "time", lambda: now)
    for seconds in (2.0,) * 8 + (0.0, 100.0):
        timer.start()
        now += seconds
        timer.stop()
    assert timer.mean() == pytest.approx(2000)
    from deepspeed.utils.timer import trim_mean

    assert trim_mean([9.0, 1.0, 2.0, 3.0], 0.25) == 2.5 and trim_mean([], 0.1) == 0 == trim_mean([1.0], 1)
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        trim_mean([1.0], 2)
    assert timer.elapsed() == pytest.approx(116_000)


def test_wrong_use_is_an_error(deepspeed: Any) -> None:
    from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer

    timers = SynchronizedWallClockTimer()
    with pytest.raises(RuntimeError, match="timer step is not started"):
        timers("step").stop()
    timers("step").start()
    with pytest.raises(RuntimeError, match="timer step has been started already"):
        timers("step").start()
    with pytest.raises(ValueError, match="normalizer: expected a number above 0, got 0"):
        timers.log(["step"], normalizer=0)
    nothing = NoopTimer()
    nothing("step").start()
    assert nothing("step").elapsed() == 0 and nothing.get_timers() == {}


def test_a_line_is_printed(deepspeed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timers = SynchronizedWallClockTimer()
    timers("step").start()
    timers.log(["step", "unknown"], ranks=[0])
    line = capsys.readouterr().out
    assert line.startswith("[Rank 0] time (ms) | step: ") and "unknown" not in line
    assert [part.split(":")[0] for part in timers.memory_usage().split(" | ")[1:]] == [
        *("mem_allocated", "max_mem_allocated"),
        *("cache_allocated", "max_cache_allocated"),
    ]
