"""Test parameters and rows whose first gradient comes when the variance learns no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.collective_step.models import section
from tests.runtime.workers import join, run_workers

KINDS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "OneBitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 3},
}


def _engine(kind: str, model: nn.Module, stage: int, **options: Any) -> Any:
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section(stage),
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **KINDS[kind], **options}},
    }
    return zlaunch.initialize(model=model, config=given)[0]


def _step(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.step()


def _embedding() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4))


def _new_rows(folder: str) -> dict[str, float]:
    """Load a checkpoint of the second phase, whose first step is dense, and use other rows in that step."""
    rank = join()
    found = {}
    generator = torch.Generator().manual_seed(rank)
    for kind, stage in {"OneBitAdam": 0, "OneBitLamb": 3, "ZeroOneAdam": 1}.items():
        engine = _engine(kind, _embedding(), stage)
        for _ in range(5):
            _step(engine, torch.randint(0, 20, (4, 8), generator=generator))
        engine.save_checkpoint(folder, tag=kind)
        engine.destroy()
        engine = _engine(kind, _embedding(), stage)
        engine.load_checkpoint(folder, tag=kind)
        before = engine.module.state_dict()["0.weight"].clone()
        _step(engine, torch.arange(50).view(5, 10))
        moved = (engine.module.state_dict()["0.weight"] - before).abs().amax(dim=1)
        assert float(moved[:20].min()) > 0, "rows with a variance move"
        found[kind] = float(moved[20:].max())
        engine.destroy()
    return found


def test_rows_without_a_variance_stay_in_the_dense_step_after_a_load(tmp_path: Path) -> None:
    for found in run_workers(_new_rows, 2, str(tmp_path)):
        assert {name: moved for name, moved in found.items() if moved} == {}


class Late(nn.Module):
    """Adds ``shift`` when told to. One rank of two has all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.shift = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))
        self.shifts = False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift if self.shifts else self.layer(x)


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))


def _holds_shift(engine: Any) -> bool:
    (unit,) = (each for each in engine.units if "shift" in each.names)
    slot = unit.layout.slots[unit.names.index("shift")]
    assert not unit.start < slot.offset < unit.stop < slot.stop
    return bool(unit.start <= slot.offset and slot.stop <= unit.stop)


def _refused(engine: Any) -> None:
    """Use ``shift``: the step is refused before it has changed anything, and others may follow."""
    engine.module.shifts = True
    groups = engine.optimizer.param_groups
    before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    weight = engine.module.state_dict()["layer.weight"].clone()
    with pytest.raises(zlaunch.OptimizerError, match="shift gets its first gradient"):
        _step(engine, X)
    after = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    assert after == before
    assert torch.equal(engine.module.state_dict()["layer.weight"], weight)
    engine.module.shifts = False
    _step(engine, X)
    assert groups[0]["step_count"] == before[0]["step_count"] + 1
    assert not torch.equal(engine.module.state_dict()["layer.weight"], weight)


def _late() -> list[bool]:
    join()
    holds = []
    for kind in KINDS:
        for stage in (1, 2):
            engine = _engine(kind, Late(), stage)
            holds.append(_holds_shift(engine))
            for _ in range(5):
                _step(engine, X)
            _refused(engine)
            engine.destroy()
    # signs of gradients: between two steps in which the variance learns
    engine = _engine("ZeroOneAdam", Late(), 1, var_freeze_step=50, var_update_scaler=2)
    for _ in range(8):
        _step(engine, X)
    _refused(engine)
    engine.destroy()
    return holds


def test_every_rank_refuses_a_first_gradient_among_signs() -> None:
    assert run_workers(_late, 2) in ([[True] * 6, [False] * 6], [[False] * 6, [True] * 6])


def _loaded(folder: str) -> None:
    """What has been trained before is what the loaded state says."""
    join()
    engine = _engine("OneBitAdam", Late(), 1)
    for shifts in (False, True):
        engine.module.shifts = shifts
        _step(engine, X)
        engine.save_checkpoint(folder, tag=f"{shifts} 2")
    engine.module.shifts = False
    for _ in range(3):
        _step(engine, X)
    engine.save_checkpoint(folder, tag="True 5")
    engine.load_checkpoint(folder, tag="False 2")
    for _ in range(4):
        _step(engine, X)
    _refused(engine)
    engine.save_checkpoint(folder, tag="False 6")
    engine.load_checkpoint(folder, tag="True 5")
    engine.module.shifts = True
    _step(engine, X)
    _step(engine, X)
    engine.destroy()
    engine = _engine("OneBitAdam", Late(), 2)
    engine.load_checkpoint(folder, tag="False 6")
    _refused(engine)  # a dense step: gradients are averaged, but the variance is frozen
    engine.load_checkpoint(folder, tag="True 5")
    engine.module.shifts = True
    _step(engine, X)
    engine.destroy()


def test_a_load_decides_what_has_been_trained(tmp_path: Path) -> None:
    run_workers(_loaded, 2, str(tmp_path))
