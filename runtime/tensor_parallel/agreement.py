"""Keeps what ranks that share layers must have in common: the batch, and the random numbers of dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..same_batch import SameBatch
from .axis import TensorAxis
from .whole_values import WholeValues


class Agreement:
    """Checks, before a forward pass of the model, that the ranks of an axis have one batch, and gives those
    of a model with dropout the random state of the first of them. A hook; on a copy of the model as well.
    """

    def __init__(self, axis: TensorAxis, has_dropout: bool) -> None:
        self._axis, self._has_dropout = axis, has_dropout
        self._values = WholeValues(axis)
        ranks = f"{axis.first} to {axis.first + axis.size - 1}"
        self._batch = SameBatch(
            axis.comm.device,
            axis.largest_of_checks,
            f"ranks {ranks} share each layer (tensor parallelism) and were given different batches: they "
            "must have the same. Give a DistributedSampler num_replicas=engine.data_parallel_size and "
            "rank=engine.data_parallel_rank, or let initialize(training_data=...) make the loader; "
            "before generate(do_sample=True) give them one torch.manual_seed",
        )

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise RankMismatchError if the ranks have different batches, or whole parameters.

        Checked are the first passes, some later ones, and all in evaluation or without gradients, which one
        rank may make alone, or with words that each rank has drawn for itself.
        """
        is_alone = not (module.training and torch.is_grad_enabled())
        self._batch.check((args, kwargs), always=is_alone)
        if not is_alone:
            self._values.check(module)
        if self._axis.own_numbers is not None:
            self._axis.own_numbers.close()  # a call of a layer by itself may have begun with them
        if self._has_dropout and module.training:
            self._share_random_state()

    def _share_random_state(self) -> None:
        """Take the random state of the axis's first rank, of the CPU's generator and the device's."""
        axis, device = self._axis, self._axis.comm.device
        held: list[Any] = [torch.get_rng_state()]
        if device.type == "cuda":
            held.append(torch.cuda.get_rng_state(device))
        dist.broadcast_object_list(held, src=axis.first, group=axis.group)
        if axis.position:
            torch.set_rng_state(held[0])
            if device.type == "cuda":
                torch.cuda.set_rng_state(held[1], device)


class Forget:
    """Lets go of the last value that was entered, and of own random numbers, at the end of a forward pass: a
    hook.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis

    def __call__(self, *arguments: Any) -> None:
        self._axis.entered = None
        if self._axis.own_numbers is not None:
            self._axis.own_numbers.close()


def uses_dropout(model: nn.Module) -> bool:
    """Tell whether a model has dropout: a module with a probability, a config that names one, or a module
    that says ``draws_random_numbers``.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if getattr(module, "draws_random_numbers", False):
            return True
    config = getattr(model, "config", None)
    values = vars(config).items() if config is not None and hasattr(config, "__dict__") else ()
    return any(("drop" in name) and isinstance(value, (int, float)) and value > 0 for name, value in values)
