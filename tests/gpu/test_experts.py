"""Test modules of experts and random numbers between cut layers on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from zlaunch.compat.deepspeed.moe import MoE
from zlaunch.runtime.parallel.tensor_axis import ShardRng

pytestmark = pytest.mark.gpu
WIDTH = 64


def _mixture() -> MoE:
    torch.manual_seed(3)
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, k=2, top2_2nd_expert_sampling=False)
    for parameter in layer.deepspeed_moe.experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layer


def _computed(layer: MoE, hidden: Tensor) -> list[Any]:
    hidden = hidden.detach().requires_grad_()
    mixed, l_aux, counts = layer(hidden)
    (mixed.square().mean() + l_aux).backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [
        each.detach().cpu() for each in (mixed, l_aux, counts, hidden.grad, *gradients) if each is not None
    ]


def test_a_mixture_computes_what_it_does_on_the_cpu() -> None:
    hidden = torch.randn(2, 96, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = _computed(_mixture(), hidden)
    found = _computed(_mixture().cuda(), hidden.cuda())
    assert len(found) == len(wanted) == 7
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_mixture_trains_at_stage_3() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixture = nn.Linear(WIDTH, WIDTH), _mixture()

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            mixed, l_aux, _ = self.mixture(self.first(hidden))
            return mixed, l_aux

    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zlaunch.initialize(model=Model(), config=config)
    hidden = torch.randn(2, 48, WIDTH, device=engine.device, dtype=torch.bfloat16)
    losses = []
    for _ in range(20):
        mixed, l_aux = engine(hidden)
        loss = (mixed.float() - 1).square().mean() + 0.01 * l_aux
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.7 * losses[0]
    assert 1 <= float(engine.step_metrics()["expert_max_load"]) <= 4  # experts


def test_shard_rng_leave_the_others_as_they_are() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    drawn = []
    for position in (None, 0, 1):
        torch.manual_seed(5)
        own = ShardRng(position or 0, device)
        inside = torch.zeros(0)
        if position is None:
            torch.randint(1 << 62, ())  # the seed
        else:
            own.open()
            inside = torch.rand(8, device=device)
            own.close()
        drawn.append((inside.cpu(), torch.rand(8), torch.rand(8, device=device).cpu()))
    for _, on_host, on_device in drawn:
        assert torch.equal(on_host, drawn[0][1]) and torch.equal(on_device, drawn[0][2])
    assert not torch.equal(drawn[1][0], drawn[2][0])
