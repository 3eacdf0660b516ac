"""Test the norm that clipping divides by, with an optimizer that a wrong factor would show in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine
from tests.runtime.workers import join, run_workers

CLIP = 0.05
TOLERANCE = 1e-9


def _errors() -> dict[str, float]:
    """Relative errors of the norm and of the values after a step of SGD: Adam would hide a factor."""
    zlaunch.init_distributed()
    (batch,) = batches(1, 12)
    plain = net().double()
    loss_of(plain, batch).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
    assert norm > 2 * CLIP
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    wanted = plain.state_dict()
    found = {}
    sgd: dict[str, Any] = {"type": "SGD", "params": {"lr": 1.0}}
    for stage in range(4):
        model = net().double()
        engine, *_ = zlaunch.initialize(model=model, config=config(stage, 6, 1, CLIP, optimizer=sgd))
        train_engine(engine, [batch])
        state = engine.module.state_dict()
        found[f"stage {stage} norm"] = abs((engine.get_global_grad_norm() or 0.0) / norm - 1)
        found[f"stage {stage} values"] = max(relative_error(state[name], wanted[name]) for name in wanted)
        engine.destroy()
    return found


def test_the_norm_is_that_of_plain_torch_at_every_stage() -> None:
    for found in run_workers(_errors, 2):
        assert len(found) == 8
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


class Weighted(nn.Module):
    """Has gradients that are the inputs times a size."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.weight, self.bias, self.size = nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(7)), size

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x * self.size).sum() + (self.bias * x[:7] * self.size).sum()


def _huge(size: float) -> dict[str, float]:
    """Return the errors, beside plain torch in float64, of a clipped step with gradients of a size."""
    rank = join()
    x = torch.randn(2, 3000, generator=torch.Generator().manual_seed(1))
    plain = Weighted(size).double()
    (sum(plain(each.double()) for each in x) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    found = {}
    for stage in (0, 2):
        given = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        }
        engine: Any = zlaunch.initialize(model=Weighted(size), config=given)[0]
        engine.backward(engine(x[rank]))
        engine.step()
        found[f"stage {stage} norm"] = abs((engine.get_global_grad_norm() or 0.0) / norm - 1)
        for name, value in plain.state_dict().items():
            found[f"stage {stage} {name}"] = relative_error(engine.module.state_dict()[name], value)
        engine.destroy()
    return found


def test_clipping_by_a_norm_whose_square_fp32_does_not_hold() -> None:
    for found in run_workers(_huge, 2, 1e25):
        assert len(found) == 6
        assert {name: error for name, error in found.items() if not error <= 1e-6} == {}
