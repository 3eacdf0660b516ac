"""Check that parameters that no engine can train are refused by name; frozen ones stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import Net, batches, config, loss_of, net, relative_error
from tests.runtime.workers import join, run_workers


class Special(nn.Parameter):
    """A class of somebody's own."""


def _dtensor() -> nn.Parameter:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))


def _shared_memory(model: Net) -> nn.Parameter:
    return nn.Parameter(model.head.weight.data[2:5])


REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "complex": (lambda m: nn.Parameter(torch.ones(3, dtype=torch.complex64)), "is complex64 and requires"),
    "float8": (
        lambda m: nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn)),
        "is float8_e4m3fn and requires",
    ),
    "lazy": (lambda m: nn.LazyLinear(4), "is lazy"),
    "meta": (lambda m: nn.Linear(4, 4, device="meta"), "is on the meta device"),
    "dtensor": (lambda m: _dtensor(), "is a DTensor"),
    "sparse": (lambda m: nn.Parameter(torch.eye(3).to_sparse()), "has the layout torch.sparse_coo"),
    "overlap": (_shared_memory, "share memory"),
}


def _refused() -> None:
    zlaunch.init_distributed()
    for stage in (0, 3):
        for name, (make, text) in REFUSED.items():
            model = net()
            model.odd = make(model)
            with pytest.raises(zlaunch.ParameterError, match=rf"odd.* {text}|{text}"):
                zlaunch.initialize(model=model, config=config(stage, 2))
            assert all(
                type(p) in (nn.Parameter, nn.parameter.UninitializedParameter) for p in net().parameters()
            )
            assert name


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_trained_is_refused_by_name(world: int) -> None:
    run_workers(_refused, world)


def _taken() -> None:
    rank = join()

    class Mixed(nn.Module):
        freqs: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = net().double()
            self.scale = Special(torch.full((24,), 0.9, dtype=torch.float64))
            self.turn = nn.Parameter(torch.tensor([1j, 1.0]), requires_grad=False)
            self.small = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
            self.count = nn.Parameter(torch.arange(3), requires_grad=False)
            self.register_buffer("freqs", torch.polar(torch.ones(4), torch.arange(4.0)))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale.mean() * self.freqs[0].real

    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        plain, model = Mixed(), Mixed()
        if rank:
            model.freqs.zero_()  # rank 0's value must win
            model.turn.data.zero_()
        optimizer = torch.optim.AdamW(
            [p for p in plain.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1
        )
        given = config(stage, 2, zero={"stage3_module_granularity_threshold": 0})
        engine, *_ = zlaunch.initialize(model=model, config=given)
        for batch in batches(4, 4):
            loss_of(plain, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(loss_of(engine, batch.chunk(2)[rank]))
            engine.step()
        if stage == 3:
            with torch.no_grad():
                assert model.scale.isnan().all()
        state, wanted = model.state_dict(), plain.state_dict()
        for name, value in wanted.items():
            if value.dtype == torch.float64:
                assert relative_error(state[name], value) <= 1e-9, (stage, name)
            else:
                assert state[name].dtype == value.dtype
                assert torch.equal(state[name].view(torch.uint8), value.view(torch.uint8)), (stage, name)
        engine.destroy()
        assert type(model.scale) is Special and type(model.net.head.weight) is nn.Parameter


def test_frozen_parameters_of_other_dtypes_stay_and_own_classes_train() -> None:
    run_workers(_taken, 2)
