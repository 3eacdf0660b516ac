"""Test when an agent lets output gather."""

from __future__ import annotations

import time

import pytest

from zlaunch.node.pacing import Pacing


class Clock:
    """A clock that runs by sleeping alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.rests = 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rests += 1


def rests(monkeypatch: pytest.MonkeyPatch, pieces: list[int], pause_s: float = 0.0) -> int:
    """Take pieces of output, one a round, and return the number of rests."""
    clock, pacing = Clock(monkeypatch), Pacing()
    for size in pieces:
        clock.now += pause_s
        if size:
            pacing.took(size)
        pacing.end_round()
    return clock.rests


def test_it_rests_between_many_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rests(monkeypatch, [100] * 1000) > 900


def test_it_never_rests_for_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rests(monkeypatch, [1 << 18] * 1000) == 0


def test_it_never_rests_at_a_start_or_an_end_or_for_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rests(monkeypatch, [100] * 8) == 0
    assert rests(monkeypatch, [100] * 1000, pause_s=0.002) == 0
    assert rests(monkeypatch, [100, 100, 100, 0] * 250) == 0
