"""Test learning-rate schedules against DeepSpeed's formulas, written out here a second time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zlaunch.runtime.config.optimizers import SCHEDULER_PARAMS
from zlaunch.runtime.optim.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)


def optimizer(*rates: float, kind: type = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.5,)]
    return kind(groups, lr=0.5)


def follow(schedule: Schedule, steps: int) -> list[float]:
    """The first group's rate at the start and after each step."""
    found = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        found.append(schedule.optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == schedule.get_lr()
        assert schedule.get_last_lr() == [group["lr"] for group in schedule.optimizer.param_groups]
    return found


def close(found: list[float], formula: Callable[[int], float]) -> None:
    """``formula`` takes i, which is -1 at the start."""
    assert found == pytest.approx([formula(i) for i in range(-1, len(found) - 1)], rel=1e-9, abs=1e-15)


rates = st.floats(1e-6, 1.0)
counts = st.integers(1, 12)
kinds = st.sampled_from(["log", "linear"])


def growth(i: int, n: int, kind: str) -> float:
    n = max(2, n)
    return math.log(i + 1, n) if kind == "log" else i / n


@given(rates, counts, st.floats(0, 5), st.booleans())
def test_lr_range_test(low: float, size: int, rate: float, stairs: bool) -> None:
    def formula(i: int) -> float:
        return low * (1 + rate * ((i + 1) // size if stairs else (i + 1) / size))

    close(follow(LRRangeTest(optimizer(), low, size, rate, stairs), 30), formula)


@given(rates, rates, counts, kinds)
def test_warmup(low: float, high: float, n: int, kind: str) -> None:
    def formula(i: int) -> float:
        return low + (high - low) * (0.0 if i < 0 else growth(i, n, kind) if i < max(2, n) else 1.0)

    close(follow(WarmupLR(optimizer(), low, high, n, kind), 30), formula)


@given(rates, rates, counts, kinds, st.integers(1, 30))
def test_warmup_decay(low: float, high: float, n: int, kind: str, total: int) -> None:
    def formula(i: int) -> float:
        if i < 0:
            return low
        if i < max(2, n):
            return low + (high - low) * growth(i, n, kind)
        return low + (high - low) * max(0, (total - i) / max(1, total - max(2, n)))

    close(follow(WarmupDecayLR(optimizer(), total, low, high, n, kind), 40), formula)


@given(rates, st.floats(0, 1), counts, st.floats(0, 1), kinds, st.integers(1, 30))
def test_warmup_cosine(base: float, start: float, n: int, end: float, kind: str, total: int) -> None:
    def formula(i: int) -> float:
        if i < 0:
            return 0.0
        if i < max(2, n):
            return base * (start + (1 - start) * growth(i, n, kind))
        p = min(1, (i - max(2, n) + 1) / max(1, total - max(2, n)))
        return base * (end + (1 - end) * (1 + math.cos(math.pi * p)) / 2)

    close(follow(WarmupCosineLR(optimizer(base), total, start, n, end, kind), 40), formula)


def one_cycle_height(i: int, first: int, second: int) -> float:
    """The triangle in plain words: up in ``first`` steps, down in ``second``, again and again."""
    at = (i + 1) % (first + second)
    return at / first if at <= first else (first + second - at) / second


@given(rates, rates, counts, counts, st.floats(0, 3), st.integers(0, 5), st.floats(0, 1))
def test_one_cycle(
    low: float, high: float, first: int, second: int, decay: float, size: int, decay_mom: float
) -> None:
    made = OneCycle(
        optimizer(),
        cycle_min_lr=low,
        cycle_max_lr=high,
        decay_lr_rate=decay,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        decay_step_size=size,
        decay_mom_rate=decay_mom,
    )
    total = first + second

    def rate(i: int) -> float:
        if i < total:
            return low + (high - low) * one_cycle_height(i, first, second)
        return low / (1 + decay * ((i - total + 1) / size if size else 0))

    def momentum(i: int) -> float:
        if i < 0:
            return 0.8  # the first step's, as in DeepSpeed
        if i < total:
            return 0.9 - (0.9 - 0.8) * one_cycle_height(i, first, second)
        return 0.9 * (1 + decay_mom * ((i - total + 1) / size if size else 0))

    for i in range(-1, total + 6):
        group = made.optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(rate(i), rel=1e-9, abs=1e-12)
        assert group["betas"] == (pytest.approx(momentum(i), rel=1e-9), 0.99)
        made.step()


def test_one_cycle_in_stairs() -> None:
    # 8 steps up in 2 stairs, 6 down in 3: floor(4) ... the height only ever takes the stairs' values
    made = OneCycle(
        optimizer(),
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=8,
        cycle_second_step_size=6,
        cycle_first_stair_count=2,
        cycle_second_stair_count=3,
    )
    third = 1 / 3
    up = [0.0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 1.0]
    down = [2 * third, 2 * third, third, third, 0.0]
    assert follow(made, 13) == pytest.approx(up + down)


def test_one_cycle_leaves_momentum_alone_where_there_are_no_betas_or_on_request() -> None:
    sgd = optimizer(kind=torch.optim.SGD)
    follow(OneCycle(sgd, 0.1, 0.2, cycle_first_step_size=3), 5)
    assert "betas" not in sgd.param_groups[0]
    adam = optimizer()
    follow(OneCycle(adam, 0.1, 0.2, cycle_first_step_size=3, cycle_momentum=False), 5)
    assert adam.param_groups[0]["betas"] == (0.9, 0.999)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3, "lr_range_test_staircase": True},
    "OneCycle": {
        **{"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
        **{"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.25},
    },
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"warmup_num_steps": 6, "total_num_steps": 15},
    "WarmupCosineLR": {"warmup_num_steps": 6, "total_num_steps": 15},
}


def test_every_schedule_is_covered() -> None:
    assert set(ARGUMENTS) == set(SCHEDULES) == set(SCHEDULER_PARAMS)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@given(before=st.integers(0, 20))
@settings(max_examples=15)
def test_a_resumed_schedule_goes_on_bit_for_bit(name: str, before: int) -> None:
    whole = SCHEDULES[name](optimizer(0.5, 0.25), **ARGUMENTS[name])
    follow(whole, before)
    resumed = SCHEDULES[name](optimizer(0.5, 0.25), **ARGUMENTS[name])
    state = whole.state_dict()
    assert state == {"last_batch_iteration": before - 1}
    resumed.load_state_dict(state)
    for _ in range(10):
        for mine, other in zip(whole.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
            assert (mine["lr"], mine["betas"]) == (other["lr"], other["betas"])
        whole.step()
        resumed.step()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_step_to_a_given_iteration(name: str) -> None:
    walked = SCHEDULES[name](optimizer(), **ARGUMENTS[name])
    jumped = SCHEDULES[name](optimizer(), **ARGUMENTS[name])
    follow(walked, 9)
    jumped.step(8)
    assert jumped.get_last_lr() == walked.get_last_lr()
    assert jumped.state_dict() == walked.state_dict()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_begun_late_does_not_touch_the_rates_until_it_steps(name: str) -> None:
    made = SCHEDULES[name](optimizer(0.5), last_batch_iteration=3, **ARGUMENTS[name])
    assert made.optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(AssertionError, match="step"):
        made.get_last_lr()
    made.step()
    walked = SCHEDULES[name](optimizer(0.5), **ARGUMENTS[name])
    follow(walked, 5)
    assert made.get_last_lr() == walked.get_last_lr()


def test_each_group_has_its_own_rate() -> None:
    made = WarmupLR(optimizer(0.5, 0.25), warmup_num_steps=2, warmup_type="linear")
    follow(made, 2)
    assert made.get_last_lr() == [0.25, 0.125]
    follow(made, 1)
    assert made.get_last_lr() == [0.5, 0.25], "no warmup_max_lr: up to the group's own rate"
    listed = WarmupLR(optimizer(0.5, 0.25), [0.0, 0.5], [1.0, 2.0], 2, "linear")
    follow(listed, 2)
    assert listed.get_last_lr() == [0.5, 1.25]


def test_golden_values_bit_for_bit() -> None:
    """Powers of two, so that the results are exact."""
    linear = WarmupLR(optimizer(), 0.0, 1.0, 4, "linear")
    assert follow(linear, 6) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    decay = WarmupDecayLR(optimizer(), 8, 0.0, 1.0, 4, "linear")
    assert follow(decay, 11) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    log = WarmupLR(optimizer(), 0.0, 1.0, 16, "log")
    assert follow(log, 4)[1:3] == [0.0, 0.25] and log.get_last_lr() == [0.5]
    ranged = LRRangeTest(optimizer(), 0.125, 4, 2.0)
    assert follow(ranged, 4) == [0.125, 0.1875, 0.25, 0.3125, 0.375]
    cycle = OneCycle(optimizer(), 0.0, 1.0, 1.0, 2, 2, decay_step_size=1)
    assert follow(cycle, 4) == [0.0, 0.5, 1.0, 0.5, 0.0]
    cosine = WarmupCosineLR(optimizer(0.5), 6, 0.0, 2, 0.0, "linear")
    assert follow(cosine, 2) == [0.0, 0.0, 0.25]
    assert follow(cosine, 4)[-1] == 0.0


def test_golden_values_of_a_usual_config_bit_for_bit() -> None:
    """The written formula, evaluated in its order."""
    made = WarmupLR(optimizer(), 0.0, 0.001, 10, "log")
    assert follow(made, 12)[1:] == [
        0.0 + 0.001 * (math.log(i + 1) / math.log(10)) if i < 10 else 0.001 for i in range(12)
    ]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_warmup_of_one_step_is_one_of_two(steps: int) -> None:
    assert follow(WarmupLR(optimizer(), 0.0, 1.0, steps, "linear"), 3) == [0.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("cls", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
@pytest.mark.parametrize("bad", [{"warmup_num_steps": n} for n in (0, -3, 2.5, True, "9", None)])
def test_bad_warmup_arguments_are_value_errors(cls: Any, bad: dict[str, Any]) -> None:
    needed = {} if cls is WarmupLR else {"total_num_steps": 10}
    with pytest.raises(ValueError, match=next(iter(bad))):
        cls(optimizer(), **needed, **bad)


@pytest.mark.parametrize(
    ("cls", "arguments", "name"),
    [
        (WarmupLR, {"warmup_min_lr": [0.0]}, "warmup_min_lr"),
        (WarmupLR, {"warmup_max_lr": [0.0, 1.0, 2.0]}, "warmup_max_lr"),
        (LRRangeTest, {"lr_range_test_min_lr": [0.1]}, "lr_range_test_min_lr"),
        (OneCycle, {"cycle_min_lr": [0.1], "cycle_max_lr": 0.2}, "cycle_min_lr"),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": []}, "cycle_max_lr"),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": [0.8]}, "cycle_min_mom"),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_max_mom": [0.8]}, "cycle_max_mom"),
    ],
)
def test_lists_must_have_a_value_for_each_group(cls: Any, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has . values for 2 param groups"):
        cls(optimizer(0.5, 0.25), **arguments)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (LRRangeTest, {"lr_range_test_min_lr": 0.1}),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "decay_lr_rate": 0.1}),
        (WarmupLR, {"warmup_num_steps": 4}),
        (WarmupLR, {"warmup_max_lr": 0.3, "warmup_num_steps": 4}),
        (WarmupDecayLR, {"total_num_steps": 9, "warmup_num_steps": 4}),
        (WarmupCosineLR, {"total_num_steps": 9, "warmup_num_steps": 4}),
    ],
)
def test_a_group_added_later_has_the_rate_of_one_from_the_start(kind: Any, arguments: dict[str, Any]) -> None:
    from_the_start, later = optimizer(0.5, 0.25), optimizer(0.5)
    schedules = kind(from_the_start, **arguments), kind(later, **arguments)
    for step in range(7):
        if step == 2:
            later.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.25})
        for schedule in schedules:
            schedule.step()
        rates = [[group["lr"] for group in each.param_groups] for each in (from_the_start, later)]
        assert rates[0][: len(rates[1])] == rates[1] and len(rates[1]) == (1 if step < 2 else 2)


def test_a_group_added_later_needs_a_rate_where_each_has_its_own() -> None:
    given = optimizer(0.5)
    schedule = WarmupLR(given, warmup_max_lr=[0.5])
    given.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="warmup_max_lr has 1 values for 2 param groups"):
        schedule.step()
    assert schedule.last_batch_iteration == -1


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (LRRangeTest, {"lr_range_test_step_size": 0}),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": -1}),
    ],
)
def test_sizes_that_divide_must_be_positive(cls: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(arguments)[-1]} must be"):
        cls(optimizer(), **arguments)


def test_a_cycle_may_end_at_its_highest_rate() -> None:
    made = OneCycle(optimizer(), 0.0, 1.0, cycle_first_step_size=4, cycle_second_step_size=0)
    assert made.step_ratio == 1.0 and follow(made, 3) == [0.0, 0.25, 0.5, 0.75]


def test_each_group_has_its_momentum() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    adam = torch.optim.Adam([{"params": [each]} for each in parameters])
    made = OneCycle(
        adam,
        [0.1, 0.2],
        [1.0, 2.0],
        cycle_min_mom=[0.5, 0.6],
        cycle_max_mom=[0.8, 0.9],
        cycle_first_step_size=2,
    )
    # The first step takes the lowest, as in DeepSpeed.
    assert [group["betas"] for group in adam.param_groups] == [(0.5, 0.99), (0.6, 0.99)]
    assert made.get_mom() == [(0.8, 0.99), (0.9, 0.99)]
    made.step()
    assert [group["betas"][0] for group in adam.param_groups] == pytest.approx([0.65, 0.75])
    made.step()
    assert [group["betas"][0] for group in adam.param_groups] == pytest.approx([0.5, 0.6])
    assert [group["lr"] for group in adam.param_groups] == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_is_a_tensor_stays_that_tensor(shape: tuple[int, ...]) -> None:
    rate = torch.full(shape, 0.1, dtype=torch.float64)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    made = WarmupLR(sgd, warmup_num_steps=4, warmup_type="linear")
    for wanted in (0.0, 0.025, 0.05):
        made.step()
        assert sgd.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(wanted)


def test_groups_that_share_a_tensor_get_their_own_rates() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    adam = torch.optim.Adam([{"params": [each]} for each in parameters[:2]], lr=torch.tensor(0.4))
    made = WarmupLR(adam, warmup_max_lr=[0.1, 0.2], warmup_num_steps=2, warmup_type="linear")
    follow(made, 3)
    assert [group["lr"].item() for group in adam.param_groups] == pytest.approx([0.1, 0.2])
    adam = torch.optim.Adam([parameters[0]], lr=torch.tensor(0.4))
    made = WarmupLR(adam, warmup_num_steps=2, warmup_type="linear")
    follow(made, 1)
    for late in parameters[1:]:
        adam.add_param_group({"params": [late]})
        follow(made, 3)
    assert [group["lr"].item() for group in adam.param_groups] == pytest.approx([0.4, 0.4, 0.4])


def test_momentum_without_betas_is_left_alone_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.7)
    made = OneCycle(sgd, 0.1, 0.2)
    assert "OneCycle leaves the momentum of SGD as it is" in "".join(capfd.readouterr())
    assert sgd.param_groups[0]["momentum"] == 0.7 and made.get_mom() is None


def test_an_unknown_curve_is_the_default_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    made = WarmupCosineLR(optimizer(), 10, warmup_num_steps=4, warmup_type="cubic")
    assert made.warmup_type == "log" and "'cubic' is taken as 'log'" in "".join(capfd.readouterr())


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.8), (0.5, 1.0), (-0.1, 0.9), ([0.5, 0.9], 0.8)])
def test_momenta_outside_of_their_range_are_refused(low: Any, high: Any) -> None:
    limits = {"cycle_min_mom": low, "cycle_max_mom": high}
    with pytest.raises(ValueError, match="have to be from 0 to below 1"):
        OneCycle(optimizer(0.1, 0.2), 0.1, 0.2, **limits)
    OneCycle(optimizer(0.1, 0.2), 0.1, 0.2, cycle_momentum=False, **limits)
