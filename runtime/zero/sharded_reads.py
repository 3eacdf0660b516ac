"""Lets a script read a sharded parameter, as NaN, outside a pass of its model, and refuses other uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ParameterError
from .output_tensors import tensors_in

_SETTERS = (torch.Tensor.data.__set__,)  # type: ignore[attr-defined]


def remedy(name: str) -> str:
    """Return what an error says of a sharded parameter, and what to do, beginning with its name."""
    return (
        f"{name} is sharded (ZeRO stage 3), so its values are not available. Use it in the model's forward, "
        "or inside `with zlaunch.zero.GatheredParameters([parameter]):` on all ranks (modifier_rank=0 to "
        "change it)"
    )


def _address(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory; 0 for one without."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


class _ReadOnly(TorchDispatchMode):
    """Refuses every operation whose schema says that it writes to one of the given storages."""

    def __init__(self, addresses: set[int], name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is untyped
        self._addresses, self._name = addresses, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if any(_address(tensor) in self._addresses for tensor in tensors_in(value)):
                raise ParameterError(f"{func._schema.name} cannot change it: {remedy(self._name)}")
        return func(*args, **kwargs)


class FreedView(torch.Tensor):
    """Wraps the placeholder of a sharded parameter, such as ``parameter.data``."""

    is_placeholder = True
    parameter_name = "a parameter"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = next((t for t in tensors_in([args, kwargs]) if isinstance(t, FreedView)), None)
        name = cls.parameter_name if named is None else named.parameter_name
        return read_freed(func, args, kwargs or {}, name)


def read_freed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Call ``func`` on tensors over placeholders: NaN in the result, without gradients and writes.

    Raises ParameterError otherwise, which says what to do instead.
    """
    if func in _SETTERS:
        raise ParameterError(f"cannot replace its data: {remedy(name)}")
    given = list(tensors_in([args, kwargs]))
    with torch._C.DisableTorchFunctionSubclass():
        hollow = {_address(t) for t in given if _is_hollow(t)} - {0}
        with _ReadOnly(hollow, name):
            result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.requires_grad and not any(tensor is one for one in given):
                raise ParameterError(f"cannot compute its gradient: {remedy(name)}")
            if not tensor.is_floating_point() and tensor.dtype is not torch.bool:
                raise ParameterError(f"cannot return {tensor.dtype} values: {remedy(name)}")
        if isinstance(result, numpy.ndarray):
            return result.copy()
        return _marked(result, hollow, name)


def _is_hollow(tensor: Tensor) -> bool:
    """Tell whether a tensor is a sharded parameter or a view of one."""
    return bool(getattr(type(tensor), "is_placeholder", False))


def _marked(result: Any, hollow: set[int], name: str) -> Any:
    """Return the result, with tensors that share a placeholder's memory made FreedViews."""
    if isinstance(result, Tensor):
        if type(result) is Tensor and _address(result) in hollow:
            result = result.as_subclass(FreedView)
            result.parameter_name = name
        return result
    if type(result) in (list, tuple):
        return type(result)(_marked(item, hollow, name) for item in result)
    return result
