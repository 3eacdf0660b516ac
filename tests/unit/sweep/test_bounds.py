"""Test what a sweep's file says at its bounds: ranges of one number, and the smallest numbers of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from zlaunch.errors import LaunchError
from zlaunch.sweep import space as module
from zlaunch.sweep.space import EarlyStopping, SweepSpace, Values, read_space


def read(folder: Path, text: str) -> SweepSpace:
    path = folder / "space.yaml"
    path.write_text(text)
    return read_space(path)


def drawn(folder: Path, what: str, samples: int = 3) -> list[object]:
    trials: tuple[Values, ...] = read(
        folder, f"method: random\nsamples: {samples}\nparameters: {{a: {{{what}}}}}\n"
    ).trials
    return [trial["a"] for trial in trials]


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("uniform: [0.5, 0.5]", 0.5),
        ("uniform: [0, 0]", 0.0),
        ("uniform: [-2, -2]", -2.0),
        ("int_uniform: [3, 3]", 3),
        ("int_uniform: [0, 0]", 0),
        ("log_uniform: [1, 1]", 1.0),
        ("log_uniform: [1e-4, 1e-4]", pytest.approx(1e-4)),
    ],
)
def test_a_range_of_one_number_is_that_number(tmp_path: Path, what: str, value: float) -> None:
    assert drawn(tmp_path, what) == [value] * 3


def test_both_ends_of_a_range_of_whole_numbers_are_drawn(tmp_path: Path) -> None:
    assert set(drawn(tmp_path, "int_uniform: [0, 1]", samples=64)) == {0, 1}
    assert all(type(value) is int for value in drawn(tmp_path, "int_uniform: [0, 1]"))


@pytest.mark.parametrize(
    "what",
    [
        "uniform: [2, 1]",
        "uniform: [1]",
        "uniform: [1, 2, 3]",
        "uniform: [1, 2, x]",
        "uniform: 1",
        "uniform: [true, 2]",
        "uniform: [.nan, 1]",
        "uniform: [0, .inf]",
        "int_uniform: [1, 0]",
    ],
)
def test_what_is_no_range_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(LaunchError, match=r"expected \[LOW, HIGH\]"):
        drawn(tmp_path, what)


def test_a_logarithm_needs_numbers_above_0(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="numbers above 0"):
        drawn(tmp_path, "log_uniform: [0, 0]")
    with pytest.raises(LaunchError, match="numbers above 0"):
        drawn(tmp_path, "log_uniform: [-1, 1]")


def test_the_smallest_numbers_that_early_stopping_and_a_sample_take(tmp_path: Path) -> None:
    space = read(tmp_path, "parameters: {a: [1]}\nearly_stopping: {min_steps: 1, factor: 2}\n")
    assert space.early_stopping == EarlyStopping(1, 2)
    assert len(drawn(tmp_path, "uniform: [0, 1]", samples=1)) == 1
    for text in ("{min_steps: 0}", "{min_steps: 1, factor: 1}", "{min_steps: true}"):
        with pytest.raises(LaunchError, match=r"early_stopping\.(min_steps|factor): expected an integer"):
            read(tmp_path, f"parameters: {{a: [1]}}\nearly_stopping: {text}\n")


def test_a_grid_may_be_as_large_as_the_limit_and_no_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST", 6)
    assert len(read(tmp_path, "parameters: {a: [1, 2], b: [1, 2, 3]}\n").trials) == 6
    with pytest.raises(LaunchError, match="8 trials, the limit is 6"):
        read(tmp_path, "parameters: {a: [1, 2], b: [1, 2, 3, 4]}\n")
