"""Checks the types of what ``initialize`` is given, and of what the callables among it return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from .engine import Engine

_OPTIMIZER = "a torch.optim.Optimizer, a callable that makes one from parameter groups, or None"
_PARAMETERS = "an iterable of parameters, (name, parameter) pairs or param groups, or None"
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}
"""Names torch's classes around a model; FSDP's is not imported for this alone."""
_SCHEDULER = "an object with step(), a callable that makes one from an optimizer, or None"


def choose_model(args: Any, model: Any) -> tuple[Any, nn.Module]:
    """Return the script's arguments and the model. A module given as ``args``, the first argument, is the
    model. Raises ValueError for none or two, TypeError for anything else.
    """
    if isinstance(args, nn.Module):
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"initialize: the first argument is args, not the model, and the second is the model, not "
                f"{type(model).__name__}: pass them by name, as model=, optimizer=, config="
            )
        if model is not None:
            raise ValueError(
                "initialize was given two models: args and model are both a torch.nn.Module. "
                "Pass one, as model="
            )
        model = args
        args = None
    if model is None:
        raise ValueError("initialize needs a model: pass it as model=")
    _expect("model", model, "a torch.nn.Module", lambda value: isinstance(value, nn.Module))
    kind = type(model).__name__
    if isinstance(model, Engine):
        raise TypeError(f"model is already an engine ({kind}): pass engine.module")
    if _WRAPPERS & {base.__name__ for base in type(model).__mro__}:
        raise TypeError(
            f"model is a {kind}, but the engine averages gradients itself: pass the wrapped model, its "
            ".module"
        )
    return args, model


def check_arguments(**given: Any) -> None:
    """Raise TypeError, naming the argument, for a value of a type that ``initialize`` cannot use, and
    ValueError where a process group that the script was to make is missing. The config is checked where it
    is read.
    """
    for name, value in given.items():
        expected, fits = _TABLE[name]
        if name == "optimizer":
            _refuse_wrapper(value)
        if value is not None:
            _expect(name, value, expected, fits)
    require_process_group(given["dist_init_required"], "initialize")


def require_process_group(dist_init_required: bool | None, caller: str) -> None:
    """Raise ValueError where False says that the script has set up torch.distributed, and it has not."""
    if dist_init_required is False and not dist.is_initialized():
        raise ValueError(
            f"{caller}: dist_init_required=False, but torch.distributed is not initialized: call "
            "init_distributed() before, or leave the argument out"
        )


def made_optimizer(value: Any) -> torch.optim.Optimizer:
    """Return what the ``optimizer`` callable has made. Raises TypeError if that is no optimizer."""
    _refuse_wrapper(value)
    is_one = isinstance(value, torch.optim.Optimizer)
    made: torch.optim.Optimizer = _made("optimizer", value, "a torch.optim.Optimizer", is_one)
    return made


def made_scheduler(value: Any) -> Any:
    """Return what the ``lr_scheduler`` callable has made. Raises TypeError if it has no ``step()``."""
    return _made("lr_scheduler", value, "an object with step()", _steps(value))


def is_factory(value: Any) -> bool:
    """Tell whether an ``lr_scheduler`` makes one of an optimizer. A class does, although it has ``step``."""
    return callable(value) and (isinstance(value, type) or not hasattr(value, "step"))


def _expect(name: str, value: Any, expected: str, fits: Callable[[Any], bool]) -> None:
    if not fits(value):
        raise TypeError(f"initialize: {name}: expected {expected}, got {type(value).__name__}")


def _made(name: str, value: Any, expected: str, fits: bool) -> Any:
    if not fits:
        raise TypeError(
            f"initialize: {name}: the callable returned {type(value).__name__}, expected {expected}"
        )
    return value


def _refuse_wrapper(optimizer: Any) -> None:
    """Raise TypeError for an object around an optimizer: the engine would step one and the script another."""
    inner = None if isinstance(optimizer, type) else getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
        raise TypeError(
            f"initialize: optimizer: {type(optimizer).__name__} is a wrapper around {type(inner).__name__}: "
            "pass its .optimizer, the torch optimizer itself"
        )


def _steps(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "step", None))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def _is_dataset(value: Any) -> bool:
    if isinstance(value, IterableDataset):
        return True
    has_items = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return has_items and not isinstance(value, (str, bytes, Mapping))


def _are_parameters(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Tensor, nn.Module))


_TABLE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "args": (
        "the script's parsed arguments (an object with attributes, such as argparse.Namespace) or None",
        lambda value: type(value) not in (str, bytes, dict, list, tuple),
    ),
    "optimizer": (
        _OPTIMIZER,
        lambda value: isinstance(value, torch.optim.Optimizer) or _is_function(value),
    ),
    "model_parameters": (_PARAMETERS, _are_parameters),
    "training_data": (
        "a dataset with __len__ and __getitem__, an IterableDataset or None (a DataLoader goes to "
        "engine.dataloader)",
        _is_dataset,
    ),
    "lr_scheduler": (_SCHEDULER, lambda value: _steps(value) or _is_function(value)),
    "distributed_port": (
        "an int or None",
        lambda value: isinstance(value, int) and not isinstance(value, bool),
    ),
    "dist_init_required": ("True, False or None", lambda value: isinstance(value, bool)),
    "collate_fn": ("a callable or None", callable),
}
"""Arguments of ``initialize``, what each may be besides None, and whether a value is that."""
