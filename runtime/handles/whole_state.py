"""Finds the optimizer's state of whole parameters, where one rank has all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.narrow_state import widen_all
from ..optim.sharded_optimizer import ShardedOptimizer
from ..optim.update_rule import is_elementwise
from ..zero.store import DeviceStore

WholeState = dict[Tensor, dict[str, Any]]
"""Maps parameters of the model to their state, as ``optimizer.state`` of torch does."""


def whole_state(step: ShardedOptimizer) -> WholeState | None:
    """Return the optimizer's state by parameter. None if other ranks have parts of it (stage 1 and up), or if
    it is off the device, which may lack the memory: on all ranks alike.

    Tensors in the dtype of their parameter are views and take no further memory.
    """
    found: WholeState = {}
    for part in step.slices:
        unit, leaf = part.unit, part.leaf
        is_whole = unit.stop - unit.start == unit.numel
        if not is_whole or leaf is None or not isinstance(unit.store, DeviceStore):
            return None
        entries = widen_all(part.entries(step.optimizer.state))
        first = unit.start + part.start
        for index, low, high in unit.layout.overlaps(first, unit.start + part.stop) if entries else ():
            parameter, shape = unit.parameters[index], unit.shapes[index]
            own = found[parameter] = {}
            for key, value in entries.items():
                if is_elementwise(value, leaf):
                    value = value.reshape(-1)[low - first : high - first].view(shape)
                elif isinstance(value, Tensor):
                    value = value.clone()  # torch counts each parameter's steps in place
                own[key] = _in_dtype_of(parameter, key, value)
    return found


def _in_dtype_of(parameter: Tensor, key: str, value: Any) -> Any:
    """Return a state entry in the parameter's dtype, as torch's ``load_state_dict`` casts it."""
    if key != "step" and isinstance(value, Tensor) and torch.is_floating_point(value):
        return value.to(parameter.dtype)
    return value
