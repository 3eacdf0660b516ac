"""Checks that parameters which each rank has whole stay equal on the ranks that share layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cut import cut_of
from ..errors import RankMismatchError
from ..zero.unit import Unit, owner_of
from .axis import TensorAxis

_FIRST = 3
_TOLERANCE = 1e-3
"""Is far above what GPUs that round differently do, and far below what another gradient does."""


class WholeValues:
    """Compares whole parameters after the first steps, and then after four times as many: a whole
    parameter that a model uses on parts of activations has another gradient on each rank.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis, self._passes, self._next = axis, 0, _FIRST

    def check(self, model: nn.Module) -> None:
        """Raise RankMismatchError, naming the first parameter that differs. Collective in some passes."""
        self._passes += 1
        if self._passes < self._next:
            return
        self._next *= 4
        names, sums = [], []
        with torch.no_grad():
            for name, values in _whole(model):
                wide = values.detach().double()
                names.append(name)
                sums.append(torch.stack([wide.sum(), wide.abs().sum()]))
        if not sums:
            return
        mine = torch.stack(sums).to(self._axis.comm.device)
        both = self._axis.largest_of_checks(torch.cat([mine, -mine]))
        highest, lowest = both[: len(names)], -both[len(names) :]
        differs = (highest - lowest).abs()[:, 0] > _TOLERANCE * highest[:, 1]
        for name, is_other in zip(names, differs.tolist(), strict=True):
            if is_other:
                raise RankMismatchError(
                    f"{name} is replicated in the tensor-parallel group but now differs between its ranks. "
                    "Possible causes: the model uses it with sharded activations (set its style to "
                    "replicated_with_grad_allreduce in tensor_parallel.plan); ranks draw different random "
                    "numbers (set draws_random_numbers = True on the module that draws them); only one "
                    "rank loaded or wrote values"
                )


def _whole(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the trained parameters that are not cut, or a sharded unit's part of them, by name; not what is
    offloaded, which a step in the background may still write.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        cut, unit = cut_of(parameter), owner_of(parameter)
        is_whole = cut is None or len(set(cut.boxes)) == 1
        if not is_whole or not isinstance(unit, Unit) or not parameter.requires_grad or unit.away:
            continue
        if not unit.shard_params:
            found[id(parameter)] = name, parameter
        elif unit.values.tensor is not None and unit.values.tensor.device == unit.device:
            unit.values.flush()
            found.setdefault(id(unit), (name, unit.values.tensor))
    return list(found.values())
