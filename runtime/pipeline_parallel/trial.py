"""Finds out, in a trial pass through a part of a pipeline, what cannot be divided: values of other stages
that it computes with, and what its layers keep to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ParameterError
from ..zero import placeholder
from ..zero.output_tensors import tensors_in
from .line import Line, modules_of

_OF_SHAPE_ALONE = ("_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")


class ForeignValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """Follows values that stand for those of other stages through all operations."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """``parameters`` are those that other stages have."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is untyped
        self._parameters = {id(parameter) for parameter in parameters}
        self._kept: dict[int, Tensor] = {}
        """Maps storages to a tensor of each, which keeps it: its number is of no other one."""

    def stand_in(self, value: Any) -> Any:
        """Return a tensor that stands for another stage's; what is no tensor stays as it is."""
        if not isinstance(value, Tensor):
            return value
        copied = value.detach().clone()
        self._mark(copied)
        return copied

    def are_in(self, value: Any) -> bool:
        """Tell whether some tensor in a value was computed from another stage's."""
        return any(map(self._is_foreign, tensors_in(value)))

    def _mark(self, tensor: Tensor) -> None:
        self._kept[tensor.untyped_storage()._cdata] = tensor

    def _is_foreign(self, tensor: Tensor) -> bool:
        return id(tensor) in self._parameters or tensor.untyped_storage()._cdata in self._kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; what it makes of a foreign value is foreign. Raises ParameterError if that is
        a number.
        """
        found = func(*args, **(kwargs or {}))
        if str(func._schema.name).endswith(_OF_SHAPE_ALONE):
            return found
        given = tree_leaves((args, kwargs or {}))
        if any(isinstance(each, Tensor) and self._is_foreign(each) for each in given):
            made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
            if not made and isinstance(found, (bool, int, float)):
                raise ParameterError(
                    "pipeline parallelism: the model reads a value of another stage, through "
                    f"{func._schema.name.removeprefix('aten::')}"
                )
            for each in made:
                self._mark(each)
        return found


@contextmanager
def trying(line: Line) -> Iterator[ForeignValues]:
    """Run a trial pass, whose changes of buffers are taken back. Raises ParameterError for layers that keep
    something which other stages would need.
    """
    foreign = ForeignValues(p for p in line.model.parameters() if placeholder.shape_of(p).numel() == 0)
    before = [
        (module, key, value, value._version, value.clone()) for module, key, value in _buffers(line.model)
    ]
    watch = StateWatch(line)
    try:
        with foreign:
            yield foreign
        watch.check()
    finally:
        with torch.no_grad():
            for module, key, value, version, copied in before:
                module._buffers[key] = value
                if value._version != version:
                    value.copy_(copied)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None:
                yield module, key, value


class StateWatch:
    """Notices buffers that the passes of a stage change, and tensors that its layers keep as attributes."""

    def __init__(self, line: Line) -> None:
        of_layers = {id(each) for layer in line.layers for each in modules_of(layer)}
        self._modules = {
            name: module
            for name, module in line.model.named_modules()
            if id(module) in of_layers or next(module.parameters(recurse=False), None) is not None
        }
        self._is_training = line.model.training
        self._before = self._states()

    def check(self) -> None:
        """Raise ParameterError for what has changed."""
        after = self._states()
        for (name, key), state in after.items():
            if self._before.get((name, key)) == state:
                continue
            place = f"{name}.{key}".lstrip(".")
            if key in self._modules[name]._buffers:
                raise ParameterError(
                    f"pipeline parallelism: training changes the buffer {place}, which other stages and "
                    "checkpoints would not see"
                )
            raise ParameterError(
                f"pipeline parallelism: the forward pass stores a tensor in {place}, which other stages do "
                "not have, so the loss cannot use it. If it is only a record, store it in evaluation only"
            )

    def _states(self) -> dict[tuple[str, str], tuple[int, int]]:
        found = {}
        for name, module in self._modules.items():
            for key, value in module._buffers.items():
                if value is not None and key not in module._non_persistent_buffers_set:
                    found[name, key] = id(value), value._version
            if self._is_training:
                for key, value in vars(module).items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        found[name, key] = id(value), 0
        return found
