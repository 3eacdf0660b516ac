"""Test which trials go on."""

from __future__ import annotations

import random

import pytest

from zlaunch.sweep.space import EarlyStopping
from zlaunch.sweep.trials import SuccessiveHalving


def test_a_trial_goes_on_while_it_is_among_the_best_third() -> None:
    halving = SuccessiveHalving(EarlyStopping(10, 3), "min")
    assert halving.goes_on(1, [(5, 9.0)]), "no rung yet"
    assert halving.goes_on(1, [(10, 9.0)]), "the first one there"
    assert not halving.goes_on(2, [(10, 9.5)])
    assert halving.goes_on(3, [(12, 8.0)])
    assert halving.goes_on(4, [(10, 8.5)]), "second of four"
    assert not halving.goes_on(5, [(10, 8.7)])
    assert halving.goes_on(3, [(29, 100.0)]), "judged at a rung alone"
    assert halving.goes_on(3, [(30, 7.0)]) and not halving.goes_on(4, [(30, 7.5)])
    assert halving.goes_on(3, [(30, 99.0)]), "the first report at a rung counts"
    assert not halving.goes_on(1, []), "others have come since that are better"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_stopped(value: float) -> None:
    assert not SuccessiveHalving(EarlyStopping(1, 2), "max").goes_on(1, [(1, value)])


def test_a_step_without_end_is_at_no_rung() -> None:
    assert SuccessiveHalving(EarlyStopping(1, 2), "min").goes_on(1, [(float("inf"), 1.0)])


@pytest.mark.parametrize("goal", ["min", "max"])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_never_stopped_and_most_steps_are_saved(goal: str, seed: int) -> None:
    """Where the order of trials is the same at all steps."""
    chance, count, steps = random.Random(seed), 30, 90
    worth = [chance.random() for _ in range(count)]
    halving = SuccessiveHalving(EarlyStopping(10, 3), goal)
    left, taken = list(range(count)), 0
    at = dict.fromkeys(left, 0)
    ended = []
    while left:
        running = left[:6]
        for trial in running:
            at[trial] += 1
            taken += 1
            if not halving.goes_on(trial, [(at[trial], worth[trial])]):
                left.remove(trial)
            elif at[trial] == steps:
                left.remove(trial)
                ended.append(trial)
    best = (min if goal == "min" else max)(range(count), key=worth.__getitem__)
    assert best in ended and taken <= count * steps / 2
