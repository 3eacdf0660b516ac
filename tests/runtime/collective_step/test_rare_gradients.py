"""Test steps together where parts of a model have a gradient late, seldom or never."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.collective_step.models import data as batches
from tests.runtime.collective_step.models import make_engine, odd, section, train
from tests.runtime.workers import join, run_workers
from zlaunch.optim import Muon

SIGNS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 5},
    "OneBitLamb": {"freeze_step": 5},
    "ZeroOneAdam": {"var_freeze_step": 50, "var_update_scaler": 2},
}


def _engine(kind: str, options: dict[str, Any], model: nn.Module, stage: int = 1, **zero: Any) -> Any:
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section(stage, **zero),
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **options}},
    }
    engine, *_ = zlaunch.initialize(model=model, config=given)
    return engine


def _step(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.step()


def _unused_rows() -> dict[str, float]:
    """Rows of an embedding that no batch uses have no variance to divide signs by."""
    rank = join()
    found = {}
    for kind, options in SIGNS.items():
        for stage in (0, 3):
            torch.manual_seed(1)
            embedding = nn.Embedding(50, 16)
            model = nn.Sequential(embedding, nn.Linear(16, 4))
            before = embedding.weight.detach().clone()
            engine = _engine(kind, options, model, stage)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(8):
                _step(engine, torch.randint(0, 20, (4, 8), generator=generator))
            moved = (engine.module.state_dict()["0.weight"] - before).abs().amax(dim=1)
            assert float(moved[:20].min()) > 0, "those that are used move"
            found[f"{kind} {stage}"] = float(moved[20:].max())
            engine.destroy()
    return found


def test_rows_that_no_batch_uses_stay_as_they_are() -> None:
    for found in run_workers(_unused_rows, 2):
        assert {name: moved for name, moved in found.items() if moved} == {}


class Late(nn.Module):
    """Uses its second layer when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) if self.both else self.a(x)


def _momentum(parameter: Tensor) -> float:
    found = zlaunch.safe_get_full_optimizer_state(parameter, "exp_avg")
    assert found is not None
    return float(found.norm())


def _late() -> float:
    """A parameter whose first gradient comes among signs is refused; one that had some before goes on."""
    join()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    for kind, options in SIGNS.items():
        model = Late()
        model.both = False
        engine = _engine(kind, options, model, 0)
        for _ in range(8):
            _step(engine, x)
        model.both = True
        with pytest.raises(zlaunch.OptimizerError, match=r"b\.weight gets its first gradient"):
            _step(engine, x)
        engine.destroy()
    model = Late()
    engine = _engine("OneBitAdam", SIGNS["OneBitAdam"], model, 1)
    norms = []
    for step in range(10):
        model.both = not 5 <= step < 8
        _step(engine, x)
        norms.append(_momentum(model.b.weight))
    zlaunch.safe_set_full_optimizer_state(model.b.weight, torch.zeros(16, 16), "exp_avg")
    _step(engine, x)
    assert _momentum(model.b.weight) < 0.3 * norms[-1], "what a script sets is not overruled by what was kept"
    engine.destroy()
    return norms[8] / (norms[4] * 0.9**4)


def test_parameters_whose_gradients_come_late() -> None:
    for ratio in run_workers(_late, 2):
        assert 0.7 < ratio < 2, "momentum decays while a parameter is not used; it is not lost"


def _muon() -> None:
    join()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    # a rate of 0 in the first step, for AdamW's part, too
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section(2),
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
    }
    engine, *_ = zlaunch.initialize(model=model, config=given)
    assert [group["use_muon"] for group in engine.optimizer.param_groups] == [True, False]
    x = torch.randn(4, 16)
    _step(engine, x)
    assert all(torch.equal(value, start[name]) for name, value in engine.module.state_dict().items())
    for _ in range(12):
        _step(engine, x)
    assert engine.get_lr() == pytest.approx([0.02, 1e-3])
    engine.destroy()


def _changed_groups(folder: str) -> None:
    """Groups that are added or changed while training goes on."""
    join()
    for zero in ({}, {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}):
        torch.manual_seed(4)
        model: Any = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        model[0].bias.requires_grad_(False)
        given = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": section(1, **zero)}
        matrices, rest = [model[0].weight], [model[2].weight, model[2].bias]
        optimizer = Muon([{"params": matrices}, {"params": rest, "use_muon": False}], lr=1e-2)
        engine, *_ = zlaunch.initialize(model=model, optimizer=optimizer, config=given)
        x = torch.randn(4, 16)
        _step(engine, x)
        with pytest.raises(ValueError, match=r"Muon steps matrices, but got a parameter of shape \[16\]"):
            optimizer.add_param_group({"params": [model[0].bias]})
        model[0].bias.requires_grad_(True)
        optimizer.add_param_group({"params": [model[0].bias], "use_muon": False})
        _step(engine, x)
        before = model[0].bias.detach().clone()
        _step(engine, x)
        assert not torch.equal(before, model[0].bias)
        optimizer.param_groups[1]["use_muon"] = True
        with pytest.raises(zlaunch.OptimizerError, match=r"2\.bias has the shape \[16\]"):
            _step(engine, x)
        engine.destroy()


def test_groups_of_muon_follow_schedules_and_changes(tmp_path: Any) -> None:
    run_workers(_muon, 2)
    run_workers(_changed_groups, 1, str(tmp_path))


class Square(nn.Module):
    """A context as long as hidden states are wide: no layer but the head is one."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(100, 64), nn.Embedding(64, 64)
        self.q, self.o = nn.Linear(64, 64), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.out = nn.Linear(64, 100)


def _chosen() -> set[str]:
    zlaunch.init_distributed()
    model = Square()
    engine = make_engine_of(model)
    chosen = {id(p) for p in engine.optimizer.param_groups[0]["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def make_engine_of(model: nn.Module) -> Any:
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Muon", "params": {}},
    }
    engine, *_ = zlaunch.initialize(model=model, config=given)
    return engine


def test_which_matrices_are_of_hidden_layers() -> None:
    assert run_workers(_chosen, 1) == [{"q.weight", "o.weight", "up.weight", "down.weight"}]


def _same_in_eval() -> bool:
    join()
    engine = make_engine(None, section(3), {"type": "Muon", "params": {"lr": 0.01}})
    train(engine, batches()[:2])
    engine.eval()
    with torch.no_grad():
        first = engine(batches()[0])
    engine.destroy()
    return bool(first.isfinite().all()) and first.shape[-1] == odd().head.out_features


def test_evaluation_after_steps() -> None:
    assert run_workers(_same_in_eval, 2) == [True, True]
