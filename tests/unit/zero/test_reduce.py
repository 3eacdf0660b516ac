"""Test the reducer of gradients over a fake communicator: order, states, passes without a reduction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.zero.layout import make_layout
from zlaunch.runtime.zero.reduce import MAX_IN_FLIGHT, Bucket, BucketState, GradientOptions, GradientReducer
from zlaunch.runtime.zero.unit import Unit

NUMEL = 32


def units_of(comm: FakeComm, count: int, *, members: int = 1, shard_params: bool = True) -> list[Unit]:
    layout = make_layout([NUMEL] * members, [0] * members, 2)
    return [
        Unit(
            f"u{index}",
            [f"u{index}.{member}" for member in range(members)],
            [nn.Parameter(torch.zeros(NUMEL)) for _ in range(members)],
            layout,
            comm,
            dtype=torch.float32,
            shard_optimizer=True,
            shard_params=shard_params,
        )
        for index in range(count)
    ]


def reducer_of(comm: FakeComm, units: list[Unit], *, transient: bool = True) -> GradientReducer:
    reducer = GradientReducer(units, comm, GradientOptions(transient=transient, dtype=None))
    reducer._agreed = True  # what rank 0 did first is not what this tests
    return reducer


def ones(value: float = 1.0) -> Tensor:
    return torch.full((NUMEL,), value)


def grad_of(unit: Unit) -> Tensor:
    """Return this rank's part of the summed gradient."""
    assert unit.store is not None and unit.store.has_grad
    return unit.store.grad()[: unit.stop - unit.start]


def started(comm: FakeComm) -> list[str]:
    return [entry.removeprefix("start reduce ") for entry in comm.log if entry.startswith("start reduce")]


def test_units_are_reduced_in_one_order_whatever_order_they_are_complete_in() -> None:
    comm = FakeComm()
    units = units_of(comm, 3)
    reducer = reducer_of(comm, units)
    reducer.begin()
    for unit in (units[0], units[2], units[1]):
        assert reducer.add(unit, 0, ones())
    assert started(comm) == ["u2", "u1", "u0"], "the reverse of their registration"
    reducer.finish()
    assert comm.in_flight == 0
    assert comm.most_in_flight <= MAX_IN_FLIGHT


def test_what_has_no_gradient_is_sent_as_zeros_at_the_end() -> None:
    comm = FakeComm(other=2.0)
    units = units_of(comm, 2, members=2)
    reducer = reducer_of(comm, units)
    reducer.begin()
    assert not reducer.add(units[1], 0, ones())
    assert started(comm) == []
    reducer.finish()
    assert started(comm) == ["u1", "u0"]
    torch.testing.assert_close(grad_of(units[1]), torch.full((NUMEL,), 3.0))
    torch.testing.assert_close(grad_of(units[0]), torch.full((NUMEL,), 2.0))
    assert reducer.used() == [False, False, True, False]


@pytest.mark.parametrize("transient", [True, False])
def test_a_unit_that_is_complete_twice_in_a_pass_is_reduced_twice(transient: bool) -> None:
    comm = FakeComm()
    units = units_of(comm, 1, shard_params=transient)
    reducer = reducer_of(comm, units, transient=transient)
    reducer.begin()
    for value in (1.0, 10.0):
        reducer.add(units[0], 0, ones(value))
    reducer.finish()
    assert started(comm) == ["u0", "u0"]
    torch.testing.assert_close(grad_of(units[0]), torch.full((NUMEL // 2,), 11.0))


@pytest.mark.parametrize("synced", [[False, False], [True, False], [False, True], [True, True]])
def test_gradients_of_passes_without_a_reduction_are_not_lost(synced: list[bool]) -> None:
    comm = FakeComm(other=1.0)
    units = units_of(comm, 1, shard_params=False)
    reducer = reducer_of(comm, units, transient=False)
    for value, sync in zip((1.0, 10.0), synced, strict=True):
        reducer.sync = sync
        reducer.begin()
        reducer.add(units[0], 0, ones(value))
        reducer.finish()
    assert len(started(comm)) == sum(synced)
    reducer.reduce_rest()
    reductions = sum(synced) + (not synced[-1])
    assert len(started(comm)) == reductions
    torch.testing.assert_close(grad_of(units[0]), torch.full((NUMEL // 2,), 11.0 + reductions * comm.other))
    reducer.reduce_rest()
    assert len(started(comm)) == reductions, "there is no rest"


def test_a_step_begins_with_nothing() -> None:
    comm = FakeComm()
    units = units_of(comm, 2)
    reducer = reducer_of(comm, units)
    reducer.begin()
    reducer.add(units[1], 0, ones())
    reducer.add(units[0], 0, ones())
    assert reducer.is_busy
    reducer.clear()  # the pass ended in an exception
    assert not reducer.is_busy and comm.in_flight == 0 and reducer.passes == 0
    assert not any(reducer.used()) and not any(unit.store and unit.store.has_grad for unit in units)


def test_a_forgotten_gradient_is_gone() -> None:
    comm = FakeComm()
    units = units_of(comm, 1, members=2, shard_params=False)
    reducer = reducer_of(comm, units, transient=False)
    reducer.begin()
    for index in (0, 1):
        reducer.add(units[0], index, ones())
    reducer.finish()
    reducer.forget(units[0], 0)
    assert [reducer.has(units[0], index) for index in (0, 1)] == [False, True]
    torch.testing.assert_close(grad_of(units[0]), torch.zeros(NUMEL))  # this rank's half is parameter 0


def test_a_bucket_refuses_a_state_that_cannot_follow() -> None:
    bucket = Bucket(units_of(FakeComm(), 1)[0])
    for state in (BucketState.REDUCED, BucketState.COLLECTING_AGAIN):
        with pytest.raises(AssertionError, match="bucket u0: EMPTY"):
            bucket.move(state)
    for state in (BucketState.COLLECTING, BucketState.REDUCED, BucketState.COLLECTING_AGAIN):
        bucket.move(state)
        assert bucket.is_collecting is (state is not BucketState.REDUCED)
