"""Test that blocks are gathered ahead as far as ``stage3_prefetch_bucket_size`` asks and
``stage3_max_live_parameters`` allows, and no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.comm.pending import DONE, Pending
from zlaunch.runtime.zero.hooks import OrderHint, ShardedModel
from zlaunch.runtime.zero.placeholder import UnitState
from zlaunch.runtime.zero.policy import ShardingOptions, UnitFactory, plan_blocks
from zlaunch.runtime.zero.reduce import GradientOptions, GradientReducer
from zlaunch.runtime.zero.unit import Unit

SIZES = (512, 2048, 1024, 512, 512)
"""The elements of each layer."""


class Layer(nn.Module):
    """Uses a weight without a product of matrices, for which torch starts threads."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class Counting(FakeComm):
    """Notes how many sharded elements are live, and of which unit the gather is, whenever one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[Unit] = []
        self.begun: list[tuple[str, int]] = []

    def live(self) -> int:
        return sum(u.numel for u in self.units if u.shard_params and u.state is not UnitState.SHARDED)

    def all_gather(self, full: Tensor, source: Tensor, label: int = 0, rounded: bool = False) -> Pending:
        self.begun.append((self._labels[label], self.live()))
        return super().all_gather(full, source, label, rounded)


def make(
    budget: int,
    *,
    prefetch: int = 1,
    persistent: int = 0,
    sizes: Sequence[int] = SIZES,
    kind: type[nn.Sequential] = nn.Sequential,
) -> tuple[nn.Sequential, Counting]:
    """Make a sharded stack of layers; those of at most ``persistent`` elements stay whole."""
    comm = Counting()
    model = kind(*map(Layer, sizes))
    options = ShardingOptions(
        shard_optimizer=True,
        shard_grads=True,
        shard_params=True,
        minimum_numel=1,
        persistence_numel=persistent,
    )
    blocks = plan_blocks(model, options)
    UnitFactory(None, comm, options).build(blocks, {})
    comm.units = [unit for block in blocks for unit in block.units]
    reducer = GradientReducer(comm.units, comm, GradientOptions(transient=True, dtype=None))
    reducer._agreed = True  # the fake has no other rank's order
    driver = ShardedModel(
        model,
        blocks,
        reducer,
        comm,
        options,
        intercept=lambda module, gathered: lambda: None,
        prefetch_numel=prefetch,
        max_live_numel=budget,
    )
    driver.engine = driver  # lives as long as the model
    return model, comm


def begun_in_a_pass(model: nn.Sequential, comm: Counting) -> tuple[list[tuple[str, int]], list[int]]:
    """Train a step to learn the order; return the gathers of the next one, and what was live in each layer's
    forward.
    """
    live: list[int] = []
    for _ in range(2):
        comm.begun.clear()
        live.clear()
        handles = [
            layer.register_forward_pre_hook(lambda module, args: live.append(comm.live())) for layer in model
        ]
        model(torch.ones(())).backward()
        for handle in handles:
            handle.remove()
    return list(comm.begun), live


@pytest.mark.parametrize("budget", [0, 1024, 1025, 2559, 2560, 3071, 3072, 10**9])
def test_a_block_is_gathered_ahead_if_all_that_is_live_then_fits(budget: int) -> None:
    begun, live = begun_in_a_pass(*make(budget))
    ahead = [one + following if one + following <= budget else one for one, following in pairwise(SIZES)]
    assert live == [*ahead, SIZES[-1]]
    assert all(held <= max(budget, *SIZES) for _, held in begun)
    forward = [name for name, _ in begun][: len(SIZES)]
    assert forward == ["0", "1", "2", "3", "4"], "each is gathered once"
    # the last block stays for the backward pass
    assert [name for name, _ in begun][len(SIZES) :] == ["3", "2", "1", "0"]


def test_the_backward_pass_gathers_ahead_within_the_budget() -> None:
    for budget in (0, 1024, 1536, 2559, 2560, 3072):
        begun, _ = begun_in_a_pass(*make(budget))
        held = [live for _, live in begun[len(SIZES) :]]
        # each gather of the backward pass begins beside the block after it, or alone once that is resharded
        assert held == [
            own + later if own + later <= budget else own
            for own, later in zip(SIZES[-2::-1], SIZES[:0:-1], strict=True)
        ], budget


def test_units_that_are_never_sharded_do_not_count() -> None:
    begun, live = begun_in_a_pass(*make(3072, persistent=512))
    assert {name for name, _ in begun} == {"1", "2"}
    assert live[1] == SIZES[1] + SIZES[2], "the 512 elements of the first layer use up nothing"


@pytest.mark.parametrize("prefetch", [1, 512, 513, 1024, 3584, 3585, 10**6])
def test_blocks_are_gathered_ahead_until_they_have_the_elements_asked_for(prefetch: int) -> None:
    begun, live = begun_in_a_pass(*make(10**9, prefetch=prefetch))
    expected = []
    for at, own in enumerate(SIZES):
        ahead = 0
        for following in SIZES[at + 1 :]:
            if ahead >= prefetch:
                break
            ahead += following
        expected.append(own + ahead)
    assert live == expected
    assert [name for name, _ in begun] == ["0", "1", "2", "3", "4", "3", "2", "1", "0"]


def test_a_block_without_sharded_units_does_not_count_as_the_one_ahead() -> None:
    """A norm before a large head: the head is gathered while the layer before the norm computes."""
    sizes = (1024, 1024, 16, 2048)
    begun, live = begun_in_a_pass(*make(10**9, persistent=16, sizes=sizes))
    assert live == [2048, 1024 + 2048, 2048, 2048]
    assert [name for name, _ in begun] == ["0", "1", "3", "1", "0"]
    # in the backward pass layer 1 is gathered beside the head
    assert [held for _, held in begun] == [1024, 2048, 3072, 3072, 2048]


class Twice(nn.Sequential):
    """Uses all layers in turn, and then once more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_an_order_that_leads_in_a_circle_ends() -> None:
    model, comm = make(10**9, prefetch=10**6, sizes=(512, 1024), kind=Twice)
    begun, live = begun_in_a_pass(model, comm)
    assert live == [512 + 1024] * 4
    assert [name for name, _ in begun][:2] == ["0", "1"]


class _Stepping(Pending):
    """A step in the background that still writes a unit's values."""

    ready = False


def test_a_rank_whose_step_is_late_starts_the_same_gathers_in_the_same_order() -> None:
    """Gathers are collectives: two ranks that start others hang, also in a pass unlike the last one."""
    begun: list[list[str]] = []
    for update in (DONE, _Stepping()):
        model, comm = make(10**9)
        begun_in_a_pass(model, comm)
        comm.begun.clear()
        for unit in comm.units:
            unit.updated = update
        model[1], model[2] = model[2], model[1]
        model(torch.ones(())).backward()
        begun.append([name for name, _ in comm.begun])
    in_time, late = begun
    assert late == in_time
    assert late[:2] == ["0", "1"], "1 came second in the last pass, and is gathered ahead"


def test_what_was_resharded_inside_a_pass_is_gathered_ahead_again() -> None:
    model, comm = make(10**9, prefetch=10**6)

    def reshard(module: nn.Module, args: object, output: object) -> None:
        for unit in comm.units:
            unit.reshard()

    handle = model[0].register_forward_hook(reshard)
    begun, live = begun_in_a_pass(model, comm)
    handle.remove()
    assert [name for name, _ in begun][:10] == ["0", "1", "2", "3", "4", "1", "2", "3", "4", "3"]
    assert live[2] == sum(SIZES[2:]), "behind the block that follows, all the rest is ahead"


def test_nothing_is_gathered_ahead_without_prefetch() -> None:
    _, live = begun_in_a_pass(*make(10**9, prefetch=0))
    assert live == list(SIZES)


def test_the_order_is_walked_once_in_a_pass_however_many_small_blocks_are_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Walking all of it again for each block made the host's time grow with the square of the layers."""
    asked: list[int] = []
    after = OrderHint.after

    def noted(hint: OrderHint, block: int) -> int | None:
        asked.append(block)
        return after(hint, block)

    monkeypatch.setattr(OrderHint, "after", noted)
    layers = 40
    model, comm = make(10**9, prefetch=10**6, sizes=[16] * layers)
    begun_in_a_pass(model, comm)
    asked.clear()
    model(torch.ones(())).backward()
    # One more at each block: the last one ahead may have got a follower.
    assert 0 < len(asked) <= 2 * 2 * layers + 2
