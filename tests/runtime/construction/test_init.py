"""Test models built sharded: equal values, never whole in memory, taken over by the engine."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.models import Net, batches, config, net, train_engine, train_plain
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.zero import placeholder
from zlaunch.runtime.zero.unit import owner_of


class Initialised(Net):
    """As many models do: a pass over all modules at the end, tied weights, a copy between modules."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = nn.Parameter(torch.full((7, 3), 2.0))
        self.apply(self._init)
        with torch.no_grad():
            self.layers[1].up.weight.copy_(self.layers[0].up.weight)
            self.norm.weight[3:5] = 5.0

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.5)
            module.weight.data[0].zero_()


def _settings(folder: str, device: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
    if device != "none":
        place = {"device": device, "nvme_path": folder}
        zero |= {"offload_param": {**place, "max_in_cpu": 0}, "offload_optimizer": place}
    return config(3, 12 // torch.distributed.get_world_size(), zero=zero)


def _build(seed: int, **options: Any) -> Initialised:
    torch.manual_seed(seed)
    return Initialised(**options)


def _same_training(folder: str) -> list[str]:
    device = zlaunch.init_distributed()
    assert device.type == "cpu"
    rank = torch.distributed.get_rank()
    wrong = []
    for place in ("none", "cpu", "nvme"):
        for tied in (False, True):
            settings = _settings(folder, place)
            plain = _build(5, tied=tied)
            wanted = {name: value.clone() for name, value in plain.state_dict().items()}
            engine, *_ = zlaunch.initialize(model=plain, config=settings)
            losses = train_engine(engine, batches(3, 12))
            engine.destroy()
            with zlaunch.zero.Init(config_dict_or_path=settings):
                model = _build(5 + rank, tied=tied)  # other ranks' values are rank 0's
            owners = [owner_of(p) for p in model.parameters()]
            assert all(unit is not None and unit.full.untyped_storage().nbytes() == 0 for unit in owners)
            with zlaunch.zero.GatheredParameters(model):
                for name, value in model.named_parameters():
                    if not torch.equal(value, wanted[name]):
                        wrong.append(f"{place} {name} differs after construction")
            engine, *_ = zlaunch.initialize(model=model, config=settings)
            if train_engine(engine, batches(3, 12)) != losses:
                wrong.append(f"{place} tied={tied}: other losses")
            engine.destroy()
    return wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_the_same_values_and_training(tmp_path: Path, world: int) -> None:
    assert run_workers(_same_training, world, str(tmp_path)) == [[]] * world
    assert list(tmp_path.iterdir()) == []


TENSORS = (torch.Tensor, nn.Parameter, placeholder.ShardedParameter)


class _Watch(nn.Module):
    """Counts the whole parameters that are alive while a list of modules is built."""

    peak = 0

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([self._linear() for _ in range(count)])

    def _linear(self) -> nn.Linear:
        linear = nn.Linear(64, 64)
        with torch._C.DisableTorchFunctionSubclass():  # looking must not gather
            tensors = [t for t in gc.get_objects() if type(t) in TENSORS and t.numel() == 4096]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        _Watch.peak = max(_Watch.peak, sum(nbytes >= 4096 * 4 for nbytes in storages.values()))
        return linear


def _one_at_a_time(folder: str) -> int:
    settings = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    settings["zero_optimization"]["offload_param"] = {  # type: ignore[index]
        "device": "nvme",
        "nvme_path": folder,
        "max_in_cpu": 0,
    }
    with zlaunch.zero.Init(config_dict_or_path=settings):
        _Watch(30)
    return _Watch.peak


def test_never_more_than_one_module_is_whole(tmp_path: Path) -> None:
    assert max(run_workers(_one_at_a_time, 1, str(tmp_path))) <= 1


def _refuses(built: Any) -> None:
    for use in (built.state_dict, lambda: built(torch.ones(1, 8)), lambda: built.weight.isnan()):
        with pytest.raises(RuntimeError, match=r"pass the model to zlaunch.initialize, or read its"):
            use()


def _others() -> list[bool]:
    zlaunch.init_distributed()
    checks = []
    before = nn.Linear.__init__, nn.Module.apply, "__init_subclass__" in nn.Module.__dict__
    with zlaunch.zero.Init():

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(16))

        inside = Inside()
        held = nn.Linear(4, 4)
        view = held.weight.data  # a view that somebody keeps stays valid
        nn.Linear(2, 2)
        view.fill_(3.0)
    checks.append(placeholder.owner(inside.scale) is not None)
    with zlaunch.zero.GatheredParameters(held.weight):
        checks.append(bool((held.weight == 3.0).all()))
    checks.append(before == (nn.Linear.__init__, nn.Module.apply, "__init_subclass__" in nn.Module.__dict__))
    with zlaunch.zero.Init(enabled=False):
        checks.append(placeholder.owner(nn.Linear(2, 2).weight) is None)
    with zlaunch.zero.Init(config={"train_batch_size": 1, "zero_optimization": {"stage": 2}}):
        checks.append(placeholder.owner(nn.Linear(2, 2).weight) is None)
    with zlaunch.zero.Init(dtype=torch.bfloat16):
        checks.append(nn.Linear(2, 2).weight.dtype == torch.bfloat16)
    whole = nn.Linear(8, 8)
    wanted = whole.weight.detach().clone()
    zlaunch.zero.Init(module=whole)
    checks.append(placeholder.owner(whole.weight) is not None)
    _refuses(whole)
    with zlaunch.zero.GatheredParameters([whole.weight]):
        checks.append(torch.equal(whole.weight, wanted))
    with zlaunch.zero.Init():
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)  # copies its first layer
    checks.append(all(placeholder.owner(p) is not None for p in encoder.parameters()))
    unit = weakref.ref(placeholder.owner(whole.weight))
    del whole
    gc.collect()
    checks.append(unit() is None)
    return checks


def test_classes_views_and_switches() -> None:
    (checks,) = run_workers(_others, 1)
    assert checks == [True] * len(checks)


class _WithLora(nn.Module):
    """DeepSpeed-Chat's layer of LoRA: it takes over the parameters of the layer that it replaces."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.right = nn.Parameter(torch.linspace(-0.1, 0.1, columns * 2).view(columns, 2))
        self.left = nn.Parameter(torch.zeros(2, rows))
        self.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + (x @ self.right) @ self.left


def _add_lora(model: Net) -> None:
    for layer in model.layers:
        old = layer.up
        layer.up = _WithLora(old.weight, old.bias, old.out_features, old.in_features)


def _replaced_in_plain() -> list[float]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net()
    _add_lora(model)
    return train_plain(model, batches(6, 12))


def _replaced() -> list[float]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with zlaunch.zero.Init():
        model = Net()
    _add_lora(model)
    gc.collect()
    engine, *_ = zlaunch.initialize(model=model, config=config(3, 6))
    return train_engine(engine, batches(6, 12))


def test_a_layer_that_is_replaced_leaves_its_parameters_to_the_new_one() -> None:
    (plain,) = run_workers(_replaced_in_plain, 1)
    first, second = run_workers(_replaced, 2)
    losses = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    assert losses == pytest.approx(plain, rel=1e-9)


def _collect() -> None:
    gc.collect()  # lets the units go, which are cycles
    gc.collect()


def _all_replaced(folder: str) -> list[Any]:
    """Replace all modules of sharded models; return whether memory and files of the models are gone."""
    join()
    offload = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    settings = config(3, 6, zero={"offload_param": offload})
    found: list[Any] = []
    for ending in ("collected", "trained", "one parameter", "another model's"):
        with zlaunch.zero.Init(config_dict_or_path=settings):
            model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        for index, old in enumerate(model):
            model[index] = _WithLora(old.weight, old.bias, 64, 64)
        del old
        gc.collect()  # nothing of the model's Init is left but what holds the parameters
        units: Any = [weakref.ref(placeholder.owner(layer.weight)) for layer in model]
        found.append(all(unit() is not None for unit in units))
        kept: Any = None
        if ending == "trained":
            engine, *_ = zlaunch.initialize(model=model, config=settings)
            engine.backward(engine(torch.ones(6, 64)).sum())
            engine.step()
            engine.destroy()
            del engine
        elif ending == "one parameter":
            kept = [model[0].weight]
        elif ending == "another model's":
            with zlaunch.zero.Init(config_dict_or_path=settings):
                kept = nn.Linear(64, 64)
            kept.weight = model[0].weight
        del model
        _collect()
        if kept is not None:
            unit: Any = units[0]()
            with zlaunch.zero.GatheredParameters([unit.parameters[0]]):
                found.append(bool(unit.parameters[0].isfinite().all()))
            del unit
            del kept
            _collect()
        found.append([unit() is None for unit in units] == [True, True])
        torch.distributed.barrier()
        found.append([path.name for path in Path(folder).rglob("*") if path.is_file()])
        torch.distributed.barrier()
    return found


def test_what_nobody_holds_any_more_is_given_back(tmp_path: Path) -> None:
    once = [True, True, []]
    held = [True, True, True, []]
    assert run_workers(_all_replaced, 2, str(tmp_path)) == [[*once, *once, *held, *held]] * 2


def _modified(stage: int, folder: str) -> list[bool]:
    zlaunch.init_distributed()
    rank, checks = torch.distributed.get_rank(), []
    for device in ("none", "cpu", "nvme"):
        offload = {"offload_optimizer": {"device": device, "nvme_path": folder}} if device != "none" else {}
        settings = config(stage, 6, zero={"stage3_param_persistence_threshold": 0, **offload})
        settings["optimizer"]["params"]["lr"] = 0.0
        torch.manual_seed(0)
        model = Net()
        engine, *_ = zlaunch.initialize(model=model, config=settings)
        weight = model.layers[0].up.weight
        with zlaunch.zero.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
            if rank == 1:
                weight.fill_(0.25)
        train_engine(engine, batches(1, 12))  # a rate of zero: the master is written back
        with zlaunch.zero.GatheredParameters([weight]):
            checks.append(bool((weight == 0.25).all()))
        with pytest.raises(RuntimeError), zlaunch.zero.GatheredParameters(weight):
            raise RuntimeError("inside")
        engine.destroy()
    return checks


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathered_parameters_take_changes_of_one_rank(tmp_path: Path, stage: int) -> None:
    assert run_workers(_modified, 2, stage, str(tmp_path)) == [[True] * 3] * 2


def test_nvme_needs_a_path() -> None:
    with pytest.raises(ValueError, match="nvme_path"):
        zlaunch.zero.Init(remote_device="nvme")
    with pytest.raises(ValueError, match="remote_device"):
        zlaunch.zero.Init(remote_device="disk")


def _dtype_of_the_config() -> list[str]:
    zlaunch.init_distributed()
    lines: list[str] = []
    given = {**config(3, 12), "bf16": {"enabled": True}}
    with contextlib.redirect_stdout(io.StringIO()) as printed, zlaunch.zero.Init(config=given):
        model = net()
    lines += [line for line in printed.getvalue().splitlines() if "zero.Init" in line]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    engine, *_ = zlaunch.initialize(model=model, config=given)
    train_engine(engine, batches(1, 12))
    return lines


def test_init_takes_the_dtype_of_the_config_and_says_what_it_keeps() -> None:
    ((line,),) = run_workers(_dtype_of_the_config, 1, env={"ZLAUNCH_VERBOSE": "1"})
    numel = sum(p.numel() for p in net().parameters())
    assert "torch.bfloat16" in line and "MiB on each rank" in line and "for one module at the peak" in line
    assert numel <= int(line.split()[2].replace(",", "")) <= numel + 16 * len(list(net().parameters()))


def _late_classes() -> tuple[float, str, list[float]]:
    """Make a class inside of the context, with a constructor that a decorator wraps, and a padded bias."""
    zlaunch.init_distributed()

    def configured(kind: type[nn.Module]) -> type[nn.Module]:
        inner = kind.__init__

        def construct(module: Any, *args: Any) -> None:
            inner(module, *args)
            module.scale = 2.0

        kind.__init__ = construct  # type: ignore[method-assign,assignment]
        return kind

    with zlaunch.zero.Init(config_dict_or_path=config(3, 1)):

        @configured
        class Late(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 4)
                self.inner.bias.data = nn.functional.pad(torch.full((3,), 5.0), (0, 1))

        model: Any = Late()
    later: Any = Late()
    with zlaunch.zero.GatheredParameters([model.inner.bias]):
        bias = model.inner.bias.tolist()
    return model.scale + later.scale, type(later.inner.weight).__name__, bias


def test_classes_made_inside_keep_their_decorators() -> None:
    for scales, kind, bias in run_workers(_late_classes, 2):
        assert (scales, kind) == (4.0, "Parameter"), "plain again, and still decorated"
        assert bias == [5.0, 5.0, 5.0, 0.0], "values of equal shape may be assigned while a model is built"


def _groups_by_axes() -> list[tuple[int, float]]:
    """Train a model built sharded without weight decay on its parameters of one axis."""
    zlaunch.init_distributed()
    settings = config(3, 2)
    with zlaunch.zero.Init(config=settings):
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    engine, *_ = zlaunch.initialize(model=model, model_parameters=groups, config=settings)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    found = [(len(group["params"]), group["weight_decay"]) for group in engine.optimizer.param_groups]
    engine.destroy()
    return found


def test_groups_by_the_number_of_axes_of_sharded_parameters() -> None:
    assert run_workers(_groups_by_axes, 2) == [[(2, 0.1), (4, 0.0)]] * 2
