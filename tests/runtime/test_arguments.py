"""Test what ``initialize`` accepts for each of its arguments, and what it says about the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import zlaunch
from tests.runtime.workers import run_workers
from zlaunch.compat.deepspeed import install

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Wrapped:
    """Holds an optimizer as many libraries do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class WrappedToo(torch.optim.Optimizer):
    """Does as accelerate's AcceleratedOptimizer does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults


class _Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def _said(call: Any, **arguments: Any) -> str:
    """What a call is refused with; empty where it is not, and its engine is then ended."""
    try:
        engine, *_ = call(**{"config": CONFIG, **arguments})
    except (TypeError, ValueError) as error:
        return str(error)
    engine.destroy()
    return ""


def _refusals() -> dict[str, list[str]]:
    install()
    import deepspeed

    found = {}
    for name, call in (("zlaunch", zlaunch.initialize), ("deepspeed", deepspeed.initialize)):
        model = nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), 123.0)
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        engine, *_ = call(model=nn.Linear(2, 2), config=CONFIG)

        def foreign(groups: Any, other: Any = other) -> Any:
            return other

        attempts: list[dict[str, Any]] = [
            {"args": model, "model": nn.Linear(2, 2)},
            {"args": model, "model": sgd},
            {},
            {"model": "gpt2"},
            {"model": engine},
            {"model": nn.DataParallel(model)},
            {"model": model, "optimizer": Wrapped(sgd)},
            {"model": model, "optimizer": WrappedToo(sgd)},
            {"model": model, "optimizer": "AdamW"},
            {"model": model, "optimizer": model},
            {"model": model, "optimizer": lambda groups: "AdamW"},
            {"model": model, "optimizer": foreign},
            {"model": model, "model_parameters": model},
            {"model": model, "model_parameters": {"params": model.parameters()}},
            {"model": model, "model_parameters": model.weight},
            {"model": model, "model_parameters": [{"params": [model.weight]}, model.bias]},
            {"model": model, "model_parameters": [{"lr": 0.1}]},
            {"model": model, "model_parameters": 3},
            {"model": model, "training_data": DataLoader([1, 2])},  # type: ignore[arg-type]
            {"model": model, "training_data": iter([1, 2])},
            {"model": model, "training_data": {"train": [1, 2]}},
            {"model": model, "lr_scheduler": 3},
            {"model": model, "lr_scheduler": lambda optimizer: None},
            {"model": model, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(other)},
            {"model": model, "collate_fn": [1]},
            {"model": model, "distributed_port": "29500"},
            {"model": model, "dist_init_required": "no"},
            {"model": model, "args": "ds.json"},
            {"model": model, "config": 3},
        ]
        found[name] = [_said(call, **arguments) for arguments in attempts]
    return found


EXPECTED = (
    "two models: args and model are both",
    "the second is the model, not SGD: pass them by name",
    "needs a model",
    "model: expected a torch.nn.Module, got str",
    "pass engine.module",
    "pass the wrapped model, its .module",
    "optimizer: Wrapped is a wrapper around SGD: pass its .optimizer",
    "optimizer: WrappedToo is a wrapper around SGD: pass its .optimizer",
    "optimizer: expected a torch.optim.Optimizer, a callable that makes one from parameter groups, or None",
    "optimizer: expected a torch.optim.Optimizer",
    "optimizer: the callable returned str, expected a torch.optim.Optimizer",
    "has a tensor that is not a parameter of the model",
    "model_parameters: expected an iterable of parameters, (name, parameter) pairs or param groups, or None",
    "model_parameters: expected an iterable",
    "model_parameters: expected an iterable",
    "model_parameters: entry 1 is not a param group, unlike entry 0",
    'model_parameters: entry 0 is a dict without "params"',
    "model_parameters: expected an iterable",
    "(a DataLoader goes to engine.dataloader), got DataLoader",
    "training_data: expected a dataset",
    "training_data: expected a dataset",
    "lr_scheduler: expected an object with step(), a callable that makes one from an optimizer, or None",
    "lr_scheduler: the callable returned NoneType",
    "lr_scheduler: ConstantLR was made for another optimizer",
    "collate_fn: expected a callable or None, got list",
    "distributed_port: expected an int or None, got str",
    "dist_init_required: expected True, False or None, got str",
    "args: expected the script's parsed arguments",
    "expected a path, a dict or a base64 string, not int",
)


def test_every_argument_of_the_wrong_type_is_refused_by_its_name() -> None:
    (found,) = run_workers(_refusals, 1)
    for name, said in found.items():
        assert len(said) == len(EXPECTED)
        for text, expected in zip(said, EXPECTED, strict=True):
            assert expected in text, (name, expected, text)


def _set_up_by_the_script() -> list[str]:
    install()
    import deepspeed

    calls: list[Any] = [zlaunch.initialize, deepspeed.initialize]
    model = nn.Linear(2, 2)
    said = [_said(call, model=model, dist_init_required=False) for call in calls]
    try:
        deepspeed.init_distributed(dist_init_required=False)
    except ValueError as error:
        said.append(str(error))
    deepspeed.init_distributed(dist_init_required=True)
    deepspeed.init_distributed(dist_init_required=False)
    return said + [_said(call, model=model, dist_init_required=False) for call in calls]


def test_a_script_that_sets_up_torch_distributed_itself() -> None:
    """Lightning says so by dist_init_required=False; DeepSpeed and we raise where it has not."""
    (said,) = run_workers(_set_up_by_the_script, 1)
    refusal = "dist_init_required=False, but torch.distributed is not initialized"
    assert [refusal in text for text in said[:3]] == [True] * 3 and said[3:] == ["", ""]


def _accepted() -> list[str]:
    install()
    import deepspeed

    found = []
    calls: list[Any] = [zlaunch.initialize, deepspeed.initialize]
    for call in calls:
        model = nn.Linear(2, 2)
        engine, optimizer, *_ = call(model, config=CONFIG)
        assert engine.module is model and isinstance(optimizer, torch.optim.AdamW)
        engine.destroy()
        assert "needs a config" in _said(call, args=model, config=None)
        for arguments in (
            {"args": SimpleNamespace(local_rank=0)},
            {"model_parameters": model.named_parameters()},
            {"model_parameters": [{"params": model.named_parameters(), "lr": 0.5}]},
            {"model_parameters": filter(None.__ne__, model.parameters())},
            {"optimizer": torch.optim.SGD, "model_parameters": model.parameters()},
            {"lr_scheduler": torch.optim.lr_scheduler.ConstantLR, "optimizer": _sgd(model)},
            {"training_data": list(range(8)), "collate_fn": torch.tensor},
            {"training_data": _Numbers()},
        ):
            if said := _said(call, **{"model": model, **arguments}):
                found.append(f"{sorted(arguments)}: {said}")
        given = [{"params": model.named_parameters(), "lr": 0.5}]
        engine, optimizer, *_ = call(model=model, model_parameters=given, config=CONFIG)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        engine.destroy()
    return found


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def test_every_form_of_the_arguments_is_accepted() -> None:
    """A scheduler's class is a callable that makes one."""
    (found,) = run_workers(_accepted, 1)
    assert found == []
