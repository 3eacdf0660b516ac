"""Test how layers are found, and divided into the parts of a pipeline."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.parallel.pipeline import divide, find_layers, modules_of, weights_of


@given(st.data(), st.integers(1, 8), st.sampled_from(["best", "parameters", "uniform"]))
def test_bounds_increase(data: st.DataObject, parts: int, how: str) -> None:
    weights = data.draw(st.lists(st.integers(0, 10**12), min_size=parts, max_size=40))
    bounds = divide(weights, parts, how)
    assert bounds[0] == 0 and bounds[-1] == len(weights) and len(bounds) == parts + 1
    assert all(a < b for a, b in pairwise(bounds))
    if how == "uniform":
        sizes = [b - a for a, b in pairwise(bounds)]
        assert max(sizes) - min(sizes) <= 1


@given(st.data(), st.integers(1, 5))
def test_the_heaviest_part_is_as_light_as_can_be(data: st.DataObject, parts: int) -> None:
    weights = data.draw(st.lists(st.integers(1, 30), min_size=parts, max_size=9))
    found = divide(weights, parts, "best")
    every = [[0, *cut, len(weights)] for cut in combinations(range(1, len(weights)), parts - 1)]

    def heaviest(bounds: list[int]) -> int:
        return max(sum(weights[a:b]) for a, b in pairwise(bounds))

    assert heaviest(found) == min(map(heaviest, every))


def test_a_list_of_first_layers() -> None:
    assert divide([1] * 5, 3, [1, 4]) == [0, 1, 4, 5]
    for wrong in ([], [1], [2, 2], [0, 3], [3, 5], [4, 2], [1, 2, 3]):
        with pytest.raises(ParameterError, match="does not split 5 layers into 3 parts"):
            divide([1] * 5, 3, wrong)
    with pytest.raises(ParameterError, match="cannot split 2 layers into 3 parts"):
        divide([1, 1], 3, "best")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)])
        self.many = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
        self.mixed = nn.ModuleList([nn.Linear(99, 99), nn.LayerNorm(99)])


def test_the_list_of_most_parameters_is_found() -> None:
    model = _Model()
    assert find_layers(model) == ("many", list(model.many))
    model.zlaunch_line = "mixed"  # type: ignore[assignment]
    assert find_layers(model) == ("mixed", list(model.mixed))
    del model.zlaunch_line
    with pytest.raises(ParameterError, match=r"Linear has no nn\.ModuleList"):
        find_layers(nn.Linear(1, 1))


def test_layers_of_modules_elsewhere() -> None:
    model = _Model()
    place = nn.Identity()
    place.zlaunch_uses = (model.many[0],)  # type: ignore[assignment]
    model.zlaunch_line = [place, place]  # type: ignore[assignment]
    name, layers = find_layers(model)
    assert (name, layers) == ("", [place, place])
    assert modules_of(place) == [place, model.many[0]] and weights_of(model, layers) == [90, 90]
    model.zlaunch_weights = [1, 2]  # type: ignore[assignment]
    assert weights_of(model, layers) == [1, 2]
