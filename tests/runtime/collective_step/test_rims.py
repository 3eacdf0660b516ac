"""Test LAMB and Muon where a script does more than train: own objects and groups, frozen and unused parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.collective_step.models import (
    FEW,
    Odd,
    data,
    error,
    loss_of,
    make_engine,
    odd,
    section,
    train,
)
from tests.runtime.collective_step.references import (
    ReferenceLamb,
    ReferenceMuon,
    is_hidden,
    multiply_exactly,
)
from tests.runtime.workers import join, run_workers
from zlaunch.optim import Lamb, Muon
from zlaunch.runtime.optim.muon import split_for_muon


def _split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    named = list(model.named_parameters())
    return [p for name, p in named if is_hidden(name, p)], [p for name, p in named if not is_hidden(name, p)]


def muon_of(model: nn.Module) -> Muon:
    hidden, rest = _split(model)
    groups = [{"params": hidden}, {"params": rest, "use_muon": False, "lr": 3e-3}]
    return Muon(groups, lr=0.02, weight_decay=0.1)


def lamb_of(model: nn.Module) -> Lamb:
    """Two groups, one of which does not move as far."""
    hidden, rest = _split(model)
    return Lamb([{"params": hidden, "lr": 0.02}, {"params": rest, "max_coeff": 0.5}], lr=0.01, eps=1e-6)


def _objects() -> dict[str, float]:
    """Objects of the script, which also work outside of an engine."""
    join()
    multiply_exactly()
    found = {}
    for make in (muon_of, lamb_of):
        model = odd()
        plain = make(model)
        for tokens in data(FEW):
            model.zero_grad()
            loss_of(model, tokens).backward()
            plain.step()
        for stage in (0, 1, 3):
            engine = make_engine(make, section(stage), gradient_accumulation_steps=2)
            train(engine, data(FEW))
            found[f"{make.__name__} {stage}"] = error(engine, model)
            engine.destroy()
    return found


@pytest.mark.exhaustive
def test_objects_with_groups_equal_themselves_outside_of_an_engine() -> None:
    for found in run_workers(_objects, 3):
        assert {name: each for name, each in found.items() if not each <= 1e-9} == {}


class Branches(Odd):
    """The second layer is used in every second pass only, the third never."""

    passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        x = self.embedding(tokens)
        for layer in (self.layers[0], self.layers[1])[: 1 + self.passes % 2]:
            x = x + layer(self.norm(x))
        return self.head(self.convolution(x.transpose(1, 2)).transpose(1, 2))


def _branches() -> dict[str, float]:
    join()
    multiply_exactly()
    found = {}
    for kind, reference in (("Lamb", ReferenceLamb), ("Muon", ReferenceMuon)):
        torch.manual_seed(3)
        plain = Branches().double()
        steps = reference(plain)
        for tokens in data(FEW):
            plain.zero_grad()
            loss_of(plain, tokens).backward()
            steps.step()
        options = {"lr": 0.01, "eps": 1e-6} if kind == "Lamb" else {"lr": 0.02, "adam_lr": 3e-3}
        for stage in (0, 2, 3):
            torch.manual_seed(3)
            model = Branches().double()
            given = {
                "train_micro_batch_size_per_gpu": 3,
                "zero_optimization": section(stage),
                "gradient_clipping": 0.0,
                "optimizer": {"type": kind, "params": {**options, "weight_decay": 0.1}},
            }
            engine, *_ = zlaunch.initialize(model=model, config=given)
            train(engine, data(FEW))
            found[f"{kind} {stage}"] = error(engine, plain)
            engine.destroy()
    return found


@pytest.mark.rotated
def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    for found in run_workers(_branches, 2):
        assert {name: each for name, each in found.items() if not each <= 1e-9} == {}


def _unfrozen() -> dict[str, float]:
    join()
    multiply_exactly()
    found = {}
    for kind, reference in (("Lamb", ReferenceLamb), ("Muon", ReferenceMuon)):
        models: list[Any] = [odd(), odd()]
        for model in models:
            model.layers[1].requires_grad_(False)
        steps = reference(models[0])
        options = {"lr": 0.01, "eps": 1e-6} if kind == "Lamb" else {"lr": 0.02, "adam_lr": 3e-3}
        given = {
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": section(3),
            "gradient_clipping": 0.0,
            "optimizer": {"type": kind, "params": {**options, "weight_decay": 0.1}},
        }
        engine, *_ = zlaunch.initialize(model=models[1], config=given)
        for half in (data(FEW)[: FEW // 2], data(FEW)[FEW // 2 :]):
            for tokens in half:
                models[0].zero_grad()
                loss_of(models[0], tokens).backward()
                steps.step()
            train(engine, half)
            for model in models:
                model.layers[1].requires_grad_(True)
        found[kind] = error(engine, models[0])
        engine.destroy()
    return found


def test_parameters_that_come_to_be_trained_later() -> None:
    for found in run_workers(_unfrozen, 2):
        assert {name: each for name, each in found.items() if not each <= 1e-9} == {}


def _torch_muon() -> dict[str, float]:
    """torch's own class, where torch has it."""
    join()
    kind = getattr(torch.optim, "Muon", None)
    found: dict[str, float] = {}
    if kind is None:
        return found
    for stage in (0, 1, 3):
        torch.manual_seed(1)
        models = [nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(4))).double() for _ in "12"]
        models[1].load_state_dict(models[0].state_dict())
        theirs, mine = (kind(model.parameters(), lr=0.02) for model in models)
        given = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": section(stage)}
        engine, *_ = zlaunch.initialize(model=models[1], optimizer=mine, config=given)
        for step in range(8):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step)).double()
            theirs.zero_grad()
            models[0](x).square().mean().backward()
            theirs.step()
            engine.backward(engine(x.chunk(2)[engine.global_rank]).square().mean())
            engine.step()
        found[str(stage)] = error(engine, models[0])
        engine.destroy()
    return found


def test_the_muon_of_torch_is_stepped_on_shards() -> None:
    # torch multiplies in bf16 always, in an order of its own
    for found in run_workers(_torch_muon, 2):
        assert {name: each for name, each in found.items() if not each <= 2e-2} == {}


def _narrow() -> dict[str, tuple[float, float]]:
    """bf16 and fp16, with the loss of the first and of the last steps."""
    rank = join()
    found = {}
    for kind, precision in (("Lamb", "bf16"), ("Lamb", "fp16"), ("Muon", "bf16"), ("Muon", "fp16")):
        for stage, zero in ((1, {}), (3, {"offload_optimizer": {"device": "cpu"}})):
            given = {
                "train_micro_batch_size_per_gpu": 3,
                "zero_optimization": section(stage, **zero),
                "optimizer": {"type": kind, "params": {"lr": 0.01}},
                precision: {"enabled": True},
            }
            engine, *_ = zlaunch.initialize(model=odd().float(), config=given)
            losses = []
            for _ in range(20):
                loss = loss_of(engine, data()[0].chunk(2)[rank])
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            found[f"{kind} {precision} {stage}"] = losses[0], losses[-1]
            engine.destroy()
    return found


@pytest.mark.exhaustive
def test_half_precision_learns() -> None:
    for found in run_workers(_narrow, 2):
        assert {name: each for name, each in found.items() if not each[1] < 0.9 * each[0]} == {}


def test_arguments_out_of_range_are_refused() -> None:
    weight = [nn.Parameter(torch.zeros(2, 2))]
    for make, options in (
        (Lamb, {"lr": -1.0}),
        (Lamb, {"betas": (0.9, 1.0)}),
        (Lamb, {"min_coeff": 2.0, "max_coeff": 1.0}),
        (Muon, {"momentum": 1.0}),
        (Muon, {"ns_steps": 0}),
        (Muon, {"adjust_lr_fn": "other"}),
    ):
        with pytest.raises(ValueError, match=make.__name__):
            make(weight, **options)
    with pytest.raises(ValueError, match="use_muon"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_muon_says_where_it_may_step_an_output_head(capsys: pytest.CaptureFixture[str]) -> None:
    """A head of the shape of a hidden layer cannot be told from it."""
    model = nn.ModuleDict({"words": nn.Embedding(64, 16), "down": nn.Linear(64, 16)})
    model.update({"up": nn.Linear(16, 64), "out": nn.Linear(16, 64)})
    split_for_muon([{"params": list(model.parameters())}], model, muon_lr=0.1, adam_lr=0.1)
    assert "one of up, out may be the output head" in capsys.readouterr().out
    next(model["out"].parameters()).use_muon = False  # type: ignore[attr-defined]  # our own mark
    split_for_muon([{"params": list(model.parameters())}], model, muon_lr=0.1, adam_lr=0.1)
    assert "may be" not in capsys.readouterr().out


def test_muon_and_lamb_outside_of_an_engine() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    other = nn.Parameter(weight.detach().contiguous())
    for parameter in (weight, other):
        parameter.grad = torch.ones_like(parameter)
        Muon([parameter], lr=0.1).step()
    torch.testing.assert_close(weight.contiguous(), other)
    large = nn.Parameter(torch.full((1000,), 100.0, dtype=torch.float16))  # its square is no fp16
    large.grad = torch.ones_like(large)
    Lamb([large], lr=0.1, max_coeff=1e3).step()
    assert large.detach().float().mean() == pytest.approx(90.0, rel=1e-2)


def _numbers_first(folder: str) -> None:
    join()
    model = nn.ParameterDict(
        {"scale": nn.Parameter(torch.tensor(1.0)), "weight": nn.Parameter(torch.ones(8))}
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": folder}},
    }
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    plain = {name: value.detach().clone().requires_grad_() for name, value in model.items()}
    wanted = torch.optim.Adagrad(plain.values(), lr=0.1, initial_accumulator_value=0.5)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self) -> torch.Tensor:
            return (self.inner["scale"] * self.inner["weight"]).sum()

    config["gradient_clipping"] = 0.0
    engine: Any = zlaunch.initialize(model=Product(), optimizer=optimizer, config=config)[0]
    for _ in range(3):
        engine.backward(engine())
        engine.step()
        wanted.zero_grad()
        (plain["scale"] * plain["weight"]).sum().backward()
        wanted.step()
    for name, value in plain.items():
        torch.testing.assert_close(engine.module.inner[name].detach(), value.detach())
    engine.destroy()


def test_a_number_as_the_first_parameter_on_a_disk(tmp_path: Path) -> None:
    run_workers(_numbers_first, 1, str(tmp_path))
