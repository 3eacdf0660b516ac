"""Test the loss scaler against a transcription of DeepSpeed's algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.errors import LossScaleFloorError
from zlaunch.runtime.precision import LossScaler


class AtMinimum(Exception):
    """The reference gives up."""


@dataclass
class Reference:
    """DynamicLossScaler of DeepSpeed, statement by statement, with raise_error_at_min_scale."""

    cur_scale: float
    scale_window: int
    min_scale: float
    delayed_shift: int
    consecutive_hysteresis: bool
    scale_factor: float = 2.0
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = field(init=False)

    def __post_init__(self) -> None:
        self.cur_hysteresis = self.delayed_shift

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                if self.cur_scale == self.min_scale:
                    raise AtMinimum
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable_interval = (self.cur_iter - self.last_overflow_iter) - 1
            if stable_interval > 0 and stable_interval % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


overflows = st.lists(st.one_of(st.just(False), st.booleans()), max_size=120)
settings = st.fixed_dictionaries(
    {
        "power": st.integers(0, 16),
        "window": st.integers(1, 7),
        "min_scale": st.sampled_from([0.25, 1.0, 3.0, 128.0]),
        "hysteresis": st.integers(1, 5),
        "consecutive": st.booleans(),
    }
)


def make(power: int, window: int, min_scale: float, hysteresis: int, consecutive: bool) -> LossScaler:
    scale = max(2.0**power, min_scale)
    return LossScaler(scale, True, window, min_scale, hysteresis, consecutive)


@given(settings, overflows)
def test_same_scale_as_the_reference_after_every_step(
    given_settings: dict[str, Any], history: list[bool]
) -> None:
    mine = make(**given_settings)
    theirs = Reference(mine.scale, mine.window, mine.min_scale, mine.hysteresis, mine.consecutive_hysteresis)
    for overflow in history:
        try:
            theirs.update_scale(overflow)
        except AtMinimum:
            with pytest.raises(LossScaleFloorError):
                mine.note(overflow)
            return
        mine.note(overflow)
        assert mine.scale == theirs.cur_scale


@given(settings, overflows, st.integers(0, 120))
def test_a_saved_scaler_goes_on_as_if_it_had_not_stopped(
    given_settings: dict[str, Any], history: list[bool], cut: int
) -> None:
    whole, resumed = make(**given_settings), make(**given_settings)
    resumed.scale = 12345.0
    for at, overflow in enumerate(history):
        if at == min(cut, len(history) - 1):
            resumed.load_state_dict(whole.state_dict())
        try:
            whole.note(overflow)
        except LossScaleFloorError:
            if at >= cut:
                with pytest.raises(LossScaleFloorError):
                    resumed.note(overflow)
            return
        if at >= cut:
            resumed.note(overflow)
            assert resumed.state_dict() == whole.state_dict()


@given(overflows, st.sampled_from([1.0, 128.0, 65536.0]))
def test_a_static_scale_never_changes_and_never_raises(history: list[bool], scale: float) -> None:
    scaler = LossScaler(scale, window=1, min_scale=scale, hysteresis=1)
    for overflow in history:
        scaler.note(overflow)
        assert scaler.scale == scale


def test_hysteresis_endures_overflows_before_the_scale_halves() -> None:
    scaler = LossScaler(1024.0, True, hysteresis=3)
    scales = []
    for _ in range(5):
        scaler.note(True)
        scales.append(scaler.scale)
    assert scales == [1024.0, 1024.0, 512.0, 256.0, 128.0]


def test_the_scale_doubles_after_every_window_without_overflow() -> None:
    scaler = LossScaler(2.0, True, window=3, hysteresis=1)
    scales = []
    for overflow in [False] * 3 + [True] + [False] * 7:
        scaler.note(overflow)
        scales.append(scaler.scale)
    # as in DeepSpeed, the very first growth needs one good step more than the window
    assert scales == [2, 2, 2, 1, 1, 1, 1, 2, 2, 2, 4]


def test_the_scale_stops_at_its_floor_and_the_next_overflow_raises() -> None:
    scaler = LossScaler(4.0, True, min_scale=3.0, hysteresis=1)
    scaler.note(True)
    assert scaler.scale == 3.0
    with pytest.raises(LossScaleFloorError, match="minimum loss scale, 3"):
        scaler.note(True)
    assert scaler.scale == 3.0
