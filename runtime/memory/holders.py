"""Finds what holds a process's tensor memory."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from ..zero.unit import Unit


def find_holders(
    units: Iterable[Unit], optimizer: torch.optim.Optimizer | None, device: torch.device
) -> list[tuple[str, int, int]]:
    """Return what holds memory of ``device``: a name, the number of tensors and their bytes, the largest
    first. Those of the engine are summed up by purpose, others by dtype and shape. What autograd alone keeps
    for the backward pass is not among them: Python does not know it.
    """
    labels = _labels(units, optimizer)
    sizes: dict[int, tuple[str, int]] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor):
            continue
        try:
            if each.device.type != device.type:
                continue
            storage = each.untyped_storage()
            key, nbytes = int(storage._cdata), storage.nbytes()
            shape = f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
        except Exception:  # a tensor without memory of its own: fake, functional, of a subclass
            continue
        # of several views the one that shows all of the memory names it
        if key not in sizes or each.nbytes == nbytes:
            sizes[key] = labels.get(key, shape), nbytes
    found: dict[str, list[int]] = defaultdict(list)
    for label, nbytes in sizes.values():
        found[label].append(nbytes)
    held = [(label, len(each), sum(each)) for label, each in found.items() if sum(each)]
    return sorted(held, key=lambda each: -each[2])


def _labels(units: Iterable[Unit], optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """Name the engine's storages by purpose."""
    named: list[tuple[object, str]] = []
    for unit in units:
        named.append((unit.full, "parameters"))
        for name, value in vars(unit.store).items() if hasattr(unit.store, "__dict__") else ():
            named.append((value, "gradients" if "grad" in name else "fp32 values"))
        named.append((unit.values.tensor, "parameters"))
    for state in optimizer.state.values() if optimizer is not None else ():
        named += [(value, "optimizer state") for value in state.values()]
    for group in optimizer.param_groups if optimizer is not None else ():
        named += [(parameter.grad, "gradients") for parameter in group["params"]]
    labels: dict[int, str] = {}
    for value, label in named:
        if isinstance(value, Tensor):
            labels.setdefault(int(value.untyped_storage()._cdata), label)
    return labels
