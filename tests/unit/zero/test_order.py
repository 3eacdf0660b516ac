"""Test that ranks launch their reductions in rank 0's order (Note [One order] of the reducer)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.zero.layout import make_layout
from zlaunch.runtime.zero.reduce import GradientOptions, GradientReducer
from zlaunch.runtime.zero.unit import Unit

NUMEL = 32


class Ordered(FakeComm):
    """Rank 0 where it is given no order; else another rank, which receives that order from rank 0."""

    def __init__(self, of_rank_0: list[int] | None = None) -> None:
        super().__init__()
        self.of_rank_0, self.orders = of_rank_0, []
        self.sources: list[int] = []

    orders: list[list[int]]

    def broadcast(self, tensor: Tensor, source: int = 0, among: Any = None) -> None:
        super().broadcast(tensor, source, among)
        if tensor.dtype == torch.int64:
            self.sources.append(source)
            if self.of_rank_0 is not None:
                tensor.copy_(torch.tensor(self.of_rank_0))
            self.orders.append(tensor.tolist())


def units_of(comm: FakeComm, count: int) -> list[Unit]:
    return [
        Unit(
            f"u{index}",
            [f"u{index}.weight"],
            [nn.Parameter(torch.zeros(NUMEL))],
            make_layout([NUMEL], [0], 2),
            comm,
            dtype=torch.float32,
            shard_optimizer=True,
            shard_params=True,
        )
        for index in range(count)
    ]


def run_pass(reducer: GradientReducer, units: list[Unit], completed: list[int]) -> list[str]:
    """Complete the units in an order; return that in which they were launched."""
    comm = reducer.comm
    assert isinstance(comm, Ordered)
    comm.log.clear()
    reducer.begin()
    for index in completed:
        reducer.add(units[index], 0, torch.ones(NUMEL))
    reducer.finish()
    return [entry.removeprefix("start reduce ") for entry in comm.log if entry.startswith("start reduce")]


def reducer_of(comm: FakeComm, units: list[Unit]) -> GradientReducer:
    return GradientReducer(units, comm, GradientOptions(transient=True, dtype=None))


def test_rank_0_sends_the_order_in_which_it_completed_its_units() -> None:
    comm = Ordered()
    units = units_of(comm, 4)
    reducer = reducer_of(comm, units)
    assert run_pass(reducer, units, [1, 3, 0]) == ["u3", "u2", "u1", "u0"], "the reverse of registration"
    assert (comm.orders, comm.sources) == ([[1, 3, 0, 2]], [0]), "what had no gradient comes last"
    assert run_pass(reducer, units, [0, 1, 2, 3]) == ["u1", "u3", "u0", "u2"]
    assert len(comm.orders) == 1, "ranks agree once"


def test_another_rank_follows_rank_0_whatever_it_completes_first() -> None:
    comm = Ordered(of_rank_0=[2, 0, 1])
    units = units_of(comm, 3)
    reducer = reducer_of(comm, units)
    assert run_pass(reducer, units, [0, 1, 2]) == ["u2", "u1", "u0"]
    for completed in ([0, 1, 2], [1, 2, 0], [1]):
        assert run_pass(reducer, units, completed) == ["u2", "u0", "u1"]
        reducer.clear()


def test_ranks_agree_again_on_other_units() -> None:
    comm = Ordered()
    units = units_of(comm, 3)
    reducer = reducer_of(comm, units)
    run_pass(reducer, units, [1, 2, 0])
    reducer.clear()
    reducer.set_units(units[:2])
    assert run_pass(reducer, units, [0, 1]) == ["u1", "u0"]
    assert comm.orders == [[1, 2, 0], [0, 1]]
