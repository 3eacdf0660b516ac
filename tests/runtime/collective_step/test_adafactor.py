"""Test Adafactor, torch's and transformers', beside plain torch: at all stages, offloaded and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.needs import needs_package
from tests.runtime.collective_step.models import (
    FEW,
    cases_of,
    data,
    error,
    loss_of,
    make_engine,
    odd,
    offloads,
    section,
    train,
    train_reference,
)
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.checkpoint.convert.importer import read_foreign, write_foreign
from zlaunch.runtime.checkpoint.export.consolidate import export_distributed
from zlaunch.runtime.checkpoint.format.manifest import Checkpoint
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

Maker = Callable[[nn.Module], torch.optim.Optimizer]
TOLERANCE = 1e-9


def of_torch(**options: Any) -> Maker:
    return lambda model: torch.optim.Adafactor(model.parameters(), **{"lr": 0.01, **options})


def of_transformers(**options: Any) -> Maker:
    from transformers.optimization import Adafactor

    given = {"lr": 0.01, "relative_step": False, "scale_parameter": False, **options}
    return lambda model: Adafactor(model.parameters(), **given)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    embedding, *others = model.parameters()
    groups = [{"params": [embedding], "lr": 0.03}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.Adafactor(groups, lr=0.01)


MAKERS: dict[str, Callable[[], Maker]] = {
    "torch": lambda: of_torch(weight_decay=0.1),
    "transformers": lambda: of_transformers(beta1=0.9, weight_decay=0.1),
}
OPTIONS: dict[str, Callable[[], Maker]] = {
    "torch": of_torch,
    "maximize": lambda: of_torch(maximize=True),
    "limit": lambda: of_torch(d=1.5, beta2_decay=-0.5, eps=(1e-3, 1e-1)),
    "groups": lambda: two_groups,
    "transformers": of_transformers,
    "relative": lambda: of_transformers(lr=None, relative_step=True, scale_parameter=True),
    "warmup": lambda: of_transformers(
        lr=None, relative_step=True, scale_parameter=True, warmup_init=True, beta1=0.5
    ),
    "scaled": lambda: of_transformers(scale_parameter=True, clip_threshold=0.1, decay_rate=-0.5),
}


def _train(folder: str, kind: str, clip: float) -> dict[str, float]:
    join()
    make = MAKERS[kind]()
    wanted = train_reference(make, data(FEW), clip)
    found = {}
    for stage in (0, 1, 2, 3):
        for name, extra in offloads(folder).items():
            if (stage, name) in cases_of(torch.distributed.get_world_size()):
                engine = make_engine(make, section(stage, **extra), gradient_clipping=clip)
                train(engine, data(FEW))
                found[f"{stage} {name}"] = error(engine, wanted)
                engine.destroy()
    return found


@pytest.mark.multi_gpu
@needs_package("transformers")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_stage_and_offload_equals_plain_torch(kind: str, world: int, tmp_path: Path) -> None:
    for found in run_workers(_train, world, str(tmp_path), kind, 0.5 if world == 2 else 0.0):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _options() -> dict[str, float]:
    join()
    found = {}
    for name, option in OPTIONS.items():
        make = option()
        engine = make_engine(make, section(2))
        train(engine, data(FEW))
        found[name] = error(engine, train_reference(make, data(FEW)))
        engine.destroy()
    return found


@pytest.mark.rotated
@needs_package("transformers")
def test_the_options_do_what_they_do_in_plain_torch() -> None:
    for found in run_workers(_options, 2):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


class Adafactor(torch.optim.Adafactor):
    """Is stepped as whole tensors, because a subclass may step in another way."""


def whole(model: nn.Module) -> torch.optim.Optimizer:
    return Adafactor(model.parameters(), lr=0.01, weight_decay=0.1)


def _save(folder: str, kind: str) -> None:
    join()
    for stage, name in ((0, ""), (1, "host"), (3, ""), (3, "nvme")):
        zero = section(stage, **offloads(folder)[name])
        engine = make_engine(MAKERS[kind](), zero, gradient_accumulation_steps=2)
        train(engine, data(FEW)[: FEW // 2])
        engine.save_checkpoint(f"{folder}/saved", tag=f"{stage}{name}")
        engine.destroy()


def _resume(folder: str, kind: str) -> dict[str, float]:
    join()
    wanted = train_reference(MAKERS[kind](), data(FEW))
    found = {}
    for tag, stage, name in (("0", 3, "nvme"), ("1host", 0, ""), ("3", 2, "host"), ("3nvme", 3, "")):
        engine = make_engine(MAKERS[kind](), section(stage, **offloads(folder)[name]))
        engine.load_checkpoint(f"{folder}/saved", tag=tag)
        train(engine, data(FEW)[FEW // 2 :])
        found[tag] = error(engine, wanted)
        engine.destroy()
    return found


@pytest.mark.rotated
@needs_package("transformers")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
@pytest.mark.parametrize("kind", MAKERS)
def test_runs_resume_in_another_world(kind: str, before: int, after: int, tmp_path: Path) -> None:
    run_workers(_save, before, str(tmp_path), kind)
    for found in run_workers(_resume, after, str(tmp_path), kind):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _hand_over(kind: str) -> dict[str, float]:
    """Give state to another engine's optimizer, and to plain torch at the end."""
    join()
    wanted = train_reference(MAKERS[kind](), data(FEW))
    found = {}
    for stage in (0, 3):
        first = make_engine(MAKERS[kind](), section(stage))
        train(first, data(FEW)[:3])
        second = make_engine(MAKERS[kind](), section(stage))
        second.module.load_state_dict(first.module.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        first.destroy()
        train(second, data(FEW)[3:6])
        if stage == 0:
            second.destroy()
            for tokens in data(FEW)[6:]:
                second.optimizer.zero_grad()
                loss_of(second.module, tokens).backward()
                second.optimizer.step()
        else:
            train(second, data(FEW)[6:])
        found[str(stage)] = error(second, wanted)
    return found


@needs_package("transformers")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MAKERS)
def test_state_goes_to_another_engine_and_to_plain_torch(kind: str) -> None:
    for found in run_workers(_hand_over, 2, kind):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _sparse() -> list[bool]:
    """Most rows of an embedding have no gradient for a long time: in fp32 their second moments are tiny."""
    rank = join()
    found = []
    for make in (of_torch(), of_transformers()):
        for stage in (0, 3):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4))
            given = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": section(stage)}
            engine, *_ = zlaunch.initialize(model=model, optimizer=make(model), config=given)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(20):
                tokens = torch.randint(0, 20, (4, 8), generator=generator)
                engine.backward(engine(tokens).square().mean() * 1e-9)
                engine.step()
            state = engine.module.state_dict()
            found.append(all(bool(value.isfinite().all()) for value in state.values()))
            engine.destroy()
    return found


@pytest.mark.rotated
@needs_package("transformers")
def test_rows_without_a_gradient_stay_finite() -> None:
    assert run_workers(_sparse, 2) == [[True] * 4] * 2


def _other_package(folder: str) -> list[str]:
    """Each of the two classes with a checkpoint of the other."""
    join()
    makers = [of_torch(), of_transformers(beta1=0.9)]
    said = []
    for tag, make in enumerate(makers):
        engine = make_engine(make, section(1))
        train(engine, data(FEW)[:2])
        engine.save_checkpoint(folder, tag=str(tag))
        engine.destroy()
    for tag, make in enumerate(reversed(makers)):
        engine = make_engine(make, section(2))
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, tag=str(tag))
        said.append(str(caught.value))
        engine.load_checkpoint(folder, tag=str(tag), load_optimizer_states=False)
        engine.destroy()
    return said


@needs_package("transformers")
def test_one_class_does_not_take_the_state_of_the_other(tmp_path: Path) -> None:
    for first, second in run_workers(_other_package, 2, str(tmp_path)):
        assert "is not the state of transformers.optimization.Adafactor, but of another package's" in first
        assert "is not the state of torch.optim.Adafactor, but" in second


def _own_rate(folder: str) -> float:
    """An optimizer without a rate in its groups."""
    join()
    make = of_transformers(lr=None, relative_step=True, scale_parameter=True)
    engine = make_engine(make, section(3))
    train(engine, data(FEW)[:4])
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make_engine(make, section(1))
    engine.load_checkpoint(folder)
    train(engine, data(FEW)[4:])
    found = error(engine, train_reference(make, data(FEW)))
    with pytest.raises(zlaunch.OptimizerError, match="computes its own learning rate"):
        engine.get_lr()
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}
    with pytest.raises(ValueError, match="but Adafactor computes its own"):
        make_engine(make, section(1), scheduler=schedule)
    engine.destroy()
    return found


@pytest.mark.rotated
@needs_package("transformers")
def test_a_run_resumes_whose_optimizer_computes_its_rate(tmp_path: Path) -> None:
    assert max(run_workers(_own_rate, 2, str(tmp_path))) <= TOLERANCE


def _changed_momentum(folder: str) -> float:
    """Momentum that ends on NVMe, where the state lies in one file."""
    join()
    make = of_transformers(beta1=0.9)
    plain = odd()
    theirs = make(plain)
    engine = make_engine(make, section(2, **offloads(folder)["nvme"]))
    for beta1 in (0.9, None):
        for optimizer in (theirs, engine.optimizer):
            optimizer.param_groups[0]["beta1"] = beta1
        for tokens in data(FEW)[:3]:
            theirs.zero_grad()
            loss_of(plain, tokens).backward()
            theirs.step()
        train(engine, data(FEW)[:3])
    found = error(engine, plain)
    engine.destroy()
    engine = make_engine(of_transformers(), section(2, **offloads(folder)["nvme"]))
    engine.optimizer.param_groups[0]["beta1"] = 0.9
    with pytest.raises(zlaunch.OptimizerError, match="set beta1 before"):
        train(engine, data(FEW)[:1])
    engine.destroy()
    return found


@needs_package("transformers")
def test_momentum_that_ends_leaves_the_other_state_on_nvme(tmp_path: Path) -> None:
    assert max(run_workers(_changed_momentum, 2, str(tmp_path))) <= TOLERANCE


def _resume_imported(folder: str, kind: str) -> float:
    join()
    engine = make_engine(MAKERS[kind](), section(2, **offloads(folder)["nvme"]))
    engine.load_checkpoint(f"{folder}/imported", tag="3")
    train(engine, data(FEW)[FEW // 2 :])
    found = error(engine, train_reference(MAKERS[kind](), data(FEW)))
    engine.destroy()
    return found


@pytest.mark.rotated
@needs_package("transformers")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MAKERS)
def test_state_goes_through_a_checkpoint_of_torch(kind: str, tmp_path: Path) -> None:
    run_workers(_save, 1, str(tmp_path), kind)
    export_distributed(Checkpoint(tmp_path / "saved" / "3"), tmp_path / "exported")
    write_foreign(read_foreign(tmp_path / "exported"), tmp_path / "imported", "3")
    # Exported weights are fp32.
    assert max(run_workers(_resume_imported, 2, str(tmp_path), kind)) <= 1e-6


class Thin(nn.Module):
    """Has matrices of one row and one column, whose sums look like state of each element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 9), nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def _thin(make: Maker, stage: int) -> Any:
    torch.manual_seed(4)
    given = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": section(stage)}
    engine, *_ = zlaunch.initialize(model=(model := Thin().double()), optimizer=make(model), config=given)
    return engine


def _thin_step(engine: Any, step: int) -> None:
    x = torch.randn(6, 1, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    engine.backward(engine(x).square().mean())
    engine.step()


def _save_whole(folder: str) -> dict[str, Tensor]:
    """Save in the middle, as whole tensors, and train to the end."""
    join()
    engine = _thin(whole, 0)
    for step in range(8):
        if step == 4:
            engine.save_checkpoint(folder, tag="whole")
        _thin_step(engine, step)
    return dict(engine.module.state_dict())


def _destroyed() -> None:
    """Thin matrices under transformers' class, whose sums have as many elements as the matrix."""
    join()
    plain = _thin(of_transformers(), 0)
    engine = _thin(of_transformers(), 0)
    for each in (plain, engine):
        _thin_step(each, 0)
    optimizer = engine.optimizer
    module = engine.module
    engine.destroy()
    x = torch.randn(6, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()
    _thin_step(plain, 1)
    for name, value in plain.module.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-12, atol=0)
    plain.destroy()


@needs_package("transformers")
def test_thin_matrices_go_on_in_plain_torch() -> None:
    run_workers(_destroyed, 1)


def _load_whole(folder: str, wanted: dict[str, Tensor]) -> None:
    join()
    for stage in (0, 3):
        for tag, before, after in (
            ("whole", whole, MAKERS["torch"]()),
            (f"parts{stage}", MAKERS["torch"](), None),
        ):
            if after is None:
                engine = _thin(before, stage)
                engine.load_checkpoint(folder, tag="whole")
                engine.save_checkpoint(folder, tag=tag)
                engine.destroy()
                after = before
            engine = _thin(after, stage)
            engine.load_checkpoint(folder, tag=tag)
            for step in range(4, 8):
                _thin_step(engine, step)
            for name, value in engine.module.state_dict().items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=0)
            engine.destroy()


def test_state_of_whole_tensors_in_a_checkpoint_goes_on_in_parts(tmp_path: Path) -> None:
    wanted = run_workers(_save_whole, 1, str(tmp_path))[0]
    run_workers(_load_whole, 2, str(tmp_path), wanted)
