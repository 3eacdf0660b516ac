"""Test a unit over a fake communicator: its storage, its states, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.zero import placeholder
from zlaunch.runtime.zero.layout import make_layout
from zlaunch.runtime.zero.placeholder import UnitState
from zlaunch.runtime.zero.unit import Unit, owner_of


def make(
    *, dtype: torch.dtype = torch.float32, shard_params: bool = True
) -> tuple[Unit, list[nn.Parameter], list[Tensor]]:
    """Make a unit of two parameters; return it with them and with clones of their values."""
    parameters = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(7))]
    values = [parameter.detach().clone() for parameter in parameters]
    layout = make_layout([p.numel() for p in parameters], [0, 0], 2)
    unit = Unit(
        "u",
        ["a", "b"],
        parameters,
        layout,
        FakeComm(),
        dtype=dtype,
        shard_optimizer=True,
        shard_params=shard_params,
    )
    return unit, parameters, values


def test_a_sharded_unit_has_no_memory_but_its_shard() -> None:
    unit, parameters, values = make()
    assert unit.state is UnitState.SHARDED and unit.full.untyped_storage().nbytes() == 0
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.shape == value.shape and owner_of(parameter) is unit
        assert parameter.isnan().all()
        with pytest.raises(ParameterError, match="is sharded"), torch.no_grad():
            parameter.add_(1)


def test_values_come_back_in_the_same_storage() -> None:
    unit, parameters, values = make()
    memory = unit.full.untyped_storage()._cdata
    for _ in range(2):
        unit.unshard()
        assert unit.state is UnitState.GATHERING
        unit.wait_unsharded()
        for parameter, value in zip(parameters, values, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
            assert parameter.untyped_storage()._cdata == memory
        unit.reshard()
        assert unit.full.untyped_storage().nbytes() == 0


def test_a_unit_is_not_gathered_twice() -> None:
    unit, *_ = make()
    unit.unshard()
    with pytest.raises(AssertionError, match="GATHERING -> GATHERING"):
        unit.unshard()
    unit.wait_unsharded()
    unit.wait_unsharded()
    assert unit.comm.log == ["start gather u", "wait gather u"]  # type: ignore[attr-defined]  # the fake's


def test_a_held_unit_stays_until_the_last_context_ends() -> None:
    unit, *_ = make()
    with unit.hold():
        with unit.hold():
            pass
        unit.reshard()
        assert unit.state.name == "UNSHARDED"
    assert unit.state.name == "SHARDED"


def test_resharding_waits_for_the_gather() -> None:
    unit, *_ = make()
    unit.unshard()
    unit.reshard()
    assert unit.state is UnitState.SHARDED
    assert unit.comm.log == ["start gather u", "wait gather u"]  # type: ignore[attr-defined]  # the fake's


def test_memory_stays_while_a_view_is_held() -> None:
    unit, parameters, values = make()
    unit.wait_unsharded()
    held = parameters[0].detach()
    unit.reshard()
    assert unit.state is UnitState.SHARDED and parameters[0].isnan().all()
    torch.testing.assert_close(held, values[0], rtol=0, atol=0)


def test_a_change_that_would_be_lost_is_an_error() -> None:
    unit, parameters, _ = make()
    unit.wait_unsharded()
    with torch.no_grad():
        parameters[1].add_(1)
    with pytest.raises(ParameterError, match="b was changed in place"):
        unit.reshard()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_params", [True, False])
def test_written_values_reach_the_master_and_the_next_gather(dtype: torch.dtype, shard_params: bool) -> None:
    unit, parameters, _ = make(dtype=dtype, shard_params=shard_params)
    unit.wait_unsharded()
    generation = unit.generation
    with torch.no_grad():
        parameters[0].fill_(3.0)
    unit.write_back()
    assert unit.generation > generation, "a graph made before cannot be used"
    assert unit.store is not None and unit.store.master is not None
    assert unit.store.master.dtype == torch.float32
    own = min(unit.stop, 20) - unit.start
    assert unit.store.master[:own].eq(3.0).all()
    with unit.values.read() as values:
        assert values[:own].eq(3.0).all()


def test_detached_parameters_are_plain_again() -> None:
    unit, parameters, values = make()
    unit.detach()
    for parameter, value in zip(parameters, values, strict=True):
        assert type(parameter) is nn.Parameter and placeholder.owner(parameter) is None
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
    assert unit.store is None
