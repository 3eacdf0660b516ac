"""Test shards in host memory: sums of gradients, their norms, and steps tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.comm.pending import DONE, Pending
from zlaunch.runtime.offload.step import step_tiles
from zlaunch.runtime.offload.stores import BufferQueue, HostStore, HostValues
from zlaunch.runtime.offload.transfer import HostLink
from zlaunch.runtime.optim.slices import make_slices, separate_unused
from zlaunch.runtime.optim.update_rule import UpdateRule
from zlaunch.runtime.zero.layout import TILE_ALIGN, make_layout, tile_ranges
from zlaunch.runtime.zero.store import ShardFacts, ShardStore, ValueStore
from zlaunch.runtime.zero.unit import Unit

CPU = torch.device("cpu")
FINE = 2.0**-9
"""Disappears in a bf16 sum with 1."""
NUMEL = TILE_ALIGN // 2


class Elsewhere(ValueStore):
    """Keeps values out of reach, as a disk does: a step hands them over in a buffer."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(None)
        self._values = values.clone()

    def write(self, start: int, values: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        self._values[start : start + values.numel()].copy_(values)
        return DONE

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        yield self._values


class HostStores:
    """Makes every shard's stores in host memory, with tiles of two parameters each."""

    def __init__(self, elsewhere: bool = False) -> None:
        self._elsewhere = elsewhere

    def make(self, values: Tensor, facts: ShardFacts) -> tuple[ShardStore | None, ValueStore]:
        link = HostLink(CPU, pin=False)
        narrow = link.empty(values.numel(), facts.dtype).copy_(values)
        kept = Elsewhere(narrow) if self._elsewhere else HostValues(link, narrow)
        master = link.empty(values.numel(), facts.master_dtype).copy_(values)
        tiles = tile_ranges(values.numel(), 2 * NUMEL)
        return HostStore(link, BufferQueue(link, 2), master, kept, facts.dtype, facts.cuts, tiles), kept


def make(dtype: torch.dtype = torch.bfloat16, *, elsewhere: bool = False) -> tuple[Unit, HostStore]:
    """Make a unit of six parameters, of which this rank has three: two in one tile, and one in another."""
    unit = Unit(
        "u",
        list("abcdef"),
        [nn.Parameter(torch.full((NUMEL,), float(index))) for index in range(6)],
        make_layout([NUMEL] * 6, [0] * 6, 2),
        FakeComm(),
        dtype=dtype,
        shard_optimizer=True,
        shard_params=True,
        stores=HostStores(elsewhere),
        tile_numel=2 * NUMEL,
    )
    assert isinstance(unit.store, HostStore)
    assert unit.store.tiles == [(0, 2 * NUMEL), (2 * NUMEL, 3 * NUMEL)]
    return unit, unit.store


def add(
    store: HostStore, value: float, *, first: bool, accumulation_dtype: torch.dtype = torch.float32
) -> None:
    assert store.master is not None
    shard = store.room_for_grad(first, torch.bfloat16, accumulation_dtype)
    store.add_grad(shard.fill_(value), first=first, stays=False)


def norm_square(store: HostStore) -> float:
    return float(torch.stack([square.double() for square in store.grad_squares()]).sum())


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_sums_of_gradients_are_wider_than_one(passes: int) -> None:
    _, store = make()
    for _ in range(2):  # memory of the first step is used again
        for number in range(passes):
            add(store, 1.0 if number == 0 else FINE, first=number == 0)
        wanted = 1 + (passes - 1) * FINE
        grad = store.grad()
        assert grad.dtype == (torch.bfloat16 if passes == 1 else torch.float32)
        assert grad.eq(wanted).all()
        covered = sum(stop - start for start, stop in store.cuts)
        assert norm_square(store) == pytest.approx(covered * wanted**2, rel=1e-4)
        store.drop_grad()
        assert not store.has_grad


def test_the_norm_is_of_what_the_gradient_is_now() -> None:
    _, store = make()
    add(store, 1.0, first=True)
    store.grad().mul_(2)
    store.grad_changed()
    covered = sum(stop - start for start, stop in store.cuts)
    assert norm_square(store) == pytest.approx(4 * covered, rel=1e-4)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_leaves_what_had_no_gradient(dtype: torch.dtype, elsewhere: bool) -> None:
    unit, store = make(dtype, elsewhere=elsewhere)
    slices = make_slices([unit], whole=False)
    optimizer = torch.optim.RMSprop(
        [part.leaf for part in slices if part.leaf is not None], lr=0.5, alpha=0.0
    )
    rule = UpdateRule(optimizer)
    for used, values in (([True, False, True], [-0.5, 1.0, 1.5]), ([False, True, False], [-0.5, 0.5, 1.5])):
        slices = separate_unused(slices, [unit], [*used, True, True, True], optimizer)
        add(store, 4.0, first=True)
        rule.begin(2.0)
        with torch.no_grad():
            assert [each for each, _ in step_tiles(rule, slices, optimizer.state, None)] == [unit]
        rule.end()
        store.drop_grad()
        with unit.values.read() as kept:
            assert store.master is not None
            for found in (store.master, kept.float()):  # steps are the sign of the gradient times the rate
                for index, value in enumerate(values):
                    torch.testing.assert_close(
                        found[index * NUMEL : (index + 1) * NUMEL],
                        torch.full((NUMEL,), value),
                        rtol=1e-5,
                        atol=0,
                    )
    assert [float(own["step"]) for own in optimizer.state.values()] == [1, 1, 1]


def test_values_written_into_parameters_are_gathered_from_the_host() -> None:
    unit, store = make()
    unit.wait_unsharded()
    with torch.no_grad():
        unit.parameters[1].fill_(7.0)
    unit.write_back()
    unit.reshard()
    with unit.values.read() as kept:
        assert store.master is not None
        for found in (store.master, kept):
            assert found[NUMEL : 2 * NUMEL].eq(7).all() and found[2 * NUMEL :].eq(2).all()
    unit.wait_unsharded()
    assert unit.parameters[1].eq(7).all()
