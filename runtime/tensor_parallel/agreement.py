"""Keeps what ranks that share layers must have in common: the batch, the random numbers of dropout, and what
the model makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..same_batch import SameBatch, SameValues
from ..zero.output_tensors import tensors_in
from .axis import TensorAxis
from .lone_uses import LoneUses
from .whole_values import WholeValues

_FIRST = 3
"""Counts the passes of a training in which outputs, and uses of cut parameters, are looked at."""


class Agreement:
    """Checks, before a forward pass of the model, that the ranks of an axis have one batch, and gives those
    of a model with dropout the random state of the first of them. A hook; on a copy of the model as well.
    """

    def __init__(
        self, axis: TensorAxis, has_dropout: bool, uses: LoneUses, *, steps_in_backward: bool
    ) -> None:
        """``uses`` is in force in the first passes, until SameOutputs leaves it."""
        self._axis, self._has_dropout, self._uses = axis, has_dropout, uses
        self._passes = 0
        self._values = WholeValues(axis)
        ranks = f"{axis.first} to {axis.first + axis.size - 1}"
        self._batch = SameBatch(
            axis.comm,
            range(axis.first, axis.first + axis.size),
            axis.largest_of_checks,
            f"ranks {ranks} are one tensor-parallel group but got different batches. Use a "
            "DistributedSampler with num_replicas=engine.data_parallel_size and "
            "rank=engine.data_parallel_rank, or pass training_data= to initialize; before "
            "generate(do_sample=True), set the same torch.manual_seed on each rank",
            every_pass=steps_in_backward,
        )

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise RankMismatchError if the ranks have different batches, or whole parameters.

        Batches of passes that train are checked here or at the step; at once those in evaluation or without
        gradients, which one rank may make alone, or with words that each rank has drawn for itself.
        """
        is_alone = not (module.training and torch.is_grad_enabled())
        self._batch.check((args, kwargs), always=is_alone)
        if not is_alone:
            self._values.check(module)
        if self._axis.own_numbers is not None:
            self._axis.own_numbers.close()  # a call of a layer by itself may have begun with them
        if self._has_dropout and module.training:
            self._share_random_state()
        is_first = self._passes < _FIRST and self._axis.watched is None  # not inside of another's pass
        if not is_alone and is_first and getattr(module, "_compiled_call_impl", None) is None:
            self._passes += 1
            self._uses.__enter__()  # type: ignore[no-untyped-call]  # torch's own is untyped
            self._axis.watched = self._uses

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


class SameOutputs:
    """Checks, after the first forward passes of the model, that the ranks of an axis have made the same of
    one batch, and lets go of what the axis keeps during a pass. A hook.
    """

    def __init__(self, axis: TensorAxis, has_part_of_logits: bool) -> None:
        self._axis, self._has_part_of_logits = axis, has_part_of_logits
        ranks = f"{axis.first} to {axis.first + axis.size - 1}"
        self._outputs = SameValues(
            axis.comm.device,
            axis.largest_of_checks,
            f"the model's outputs differ on ranks {ranks}, a tensor-parallel group with one batch. Possible "
            "causes: an operation uses a sharded weight outside its module, such as F.linear(x, "
            "module.weight): remove it from tensor_parallel.plan. A layer passes its shard to an operation "
            "that needs the whole activation: follow colwise with rowwise, or use colwise_gather_output. "
            "Ranks draw different random numbers in the model: set draws_random_numbers = True on the "
            "module that draws them",
            first=_FIRST,
        )

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Raise RankMismatchError if the ranks have different outputs, in the first passes of a training."""
        self._axis.entered = None
        if self._axis.watched is not None:
            self._axis.watched.__exit__(None, None, None)
            self._axis.watched.parts.clear()
            self._axis.watched.wholes.clear()
            self._axis.watched = None
        if self._axis.own_numbers is not None:
            self._axis.own_numbers.close()
        if output is not None and module.training and torch.is_grad_enabled():
            self._outputs.check(list(self._wholes(output)))

    def _wholes(self, output: Any) -> Iterator[Tensor]:
        """Yield the tensors of an output that each rank has whole."""
        if isinstance(output, Mapping):  # of Hugging Face; each rank has its own heads'
            output = [
                value
                for key, value in output.items()
                if "attentions" not in str(key) and "past_key_values" not in str(key)
            ]
        for tensor in tensors_in(output):
            if tensor.dim() == 0 or not self._has_part_of_logits:
                yield tensor


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
