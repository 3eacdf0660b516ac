"""Test slices of shards: parameters without a gradient are separated, with their state and their counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.optim.slices import ShardSlice, make_slices, separate_unused
from zlaunch.runtime.zero.layout import make_layout
from zlaunch.runtime.zero.unit import Unit

NUMEL = 16


def make() -> tuple[Unit, list[ShardSlice], torch.optim.Optimizer]:
    """Make a unit of four parameters, of which this rank has three in one slice, after one step of Adam."""
    names = ["a", "b", "c", "d", "e", "f"]
    unit = Unit(
        "u",
        names,
        [nn.Parameter(torch.zeros(NUMEL)) for _ in names],
        make_layout([NUMEL] * len(names), [0] * len(names), 2),
        FakeComm(),
        dtype=torch.float32,
        shard_optimizer=True,
        shard_params=True,
    )
    slices = make_slices([unit], whole=False)
    (part,) = slices
    assert part.leaf is not None and part.leaf.numel() == 3 * NUMEL
    optimizer = torch.optim.Adam([part.leaf], lr=0.1)
    part.leaf.grad = torch.arange(3.0 * NUMEL)
    optimizer.step()
    part.leaf.grad = None
    return unit, slices, optimizer


def test_a_parameter_without_a_gradient_is_separated_with_its_state() -> None:
    unit, slices, optimizer = make()
    former = slices[0].leaf
    assert former is not None
    state: dict[str, Any] = dict(optimizer.state[former])
    values = former.detach().clone()
    made = separate_unused(slices, [unit], [True, False, True, True, True, True], optimizer)
    assert [(part.start, part.stop, part.used) for part in made] == [
        (0, NUMEL, True),
        (NUMEL, 2 * NUMEL, False),
        (2 * NUMEL, 3 * NUMEL, True),
    ]
    leaves = [part.leaf for part in made if part.leaf is not None]
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], leaves, strict=True))
    assert former not in optimizer.state
    for part, leaf in zip(made, leaves, strict=True):
        inside = slice(part.start, part.stop)
        assert torch.equal(leaf.detach(), values[inside])
        own: dict[str, Tensor] = optimizer.state[leaf]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own[key], state[key][inside]), key
        assert float(own["step"]) == 1
    counts = {own["step"].data_ptr() for own in optimizer.state.values()}
    assert len(counts) == 3, "each part counts its own steps"


def test_what_has_a_gradient_again_is_marked_so() -> None:
    unit, slices, optimizer = make()
    made = separate_unused(slices, [unit], [True, False, True, True, True, True], optimizer)
    again = separate_unused(made, [unit], [True] * 6, optimizer)
    assert again == made and all(part.used for part in again)
    none = separate_unused(made, [unit], [False] * 6, optimizer)
    assert none == made and not any(part.used for part in none)


def test_parts_of_the_other_rank_split_nothing_here() -> None:
    unit, slices, optimizer = make()
    assert separate_unused(slices, [unit], [True] * 3 + [False] * 3, optimizer) == slices
    assert slices[0].used
