"""What a parameter is between its uses: classes that a parameter takes on while its values are not there.

torch itself changes a parameter's class in place (``UninitializedParameter.materialize``). While a
parameter's values are elsewhere or on their way, its class intercepts every operation on it
(``__torch_function__``), at no cost to anything else, and hands back plain ``nn.Parameter`` as soon as the
values are there:

- :class:`PendingParameter`: the all-gather after an optimizer step is under way. The first touch waits for
it.
- :class:`ShardedParameter`: freed. Reading gives NaN and writing raises, except inside a forward or backward
pass of
  its model, where a use that no module hook announced gathers the unit on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .unit import Unit


@dataclass(slots=True)
class Settings:
    """How sharded parameters look, in this process."""

    empty_placeholders: bool = False
    """A freed parameter has no elements, as DeepSpeed's have, instead of its true shape full of NaN."""


settings = Settings()
_owners: WeakValueDictionary[int, Unit] = WeakValueDictionary()
"""id of a parameter -> its unit. Not an attribute of the parameter: that would be pickled with it."""

_T = Tensor
_METADATA: frozenset[Any] = frozenset(
    [
        getattr(_T, name).__get__
        for name in (
            *("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "layout"),
            *(
                "is_cuda",
                "is_sparse",
                "is_meta",
                "_version",
                "grad_dtype",
                "is_quantized",
                "is_cpu",
                "itemsize",
            ),
            *("nbytes", "names", "_backward_hooks", "retains_grad"),
        )
        if hasattr(_T, name)
    ]
    + [_T.grad.__set__, _T.requires_grad.__set__]  # type: ignore[attr-defined,union-attr]
    + [
        _T.size,
        _T.dim,
        _T.numel,
        _T.nelement,
        _T.ndimension,
        _T.is_floating_point,
        _T.is_complex,
        _T.element_size,
    ]
    + [_T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.__hash__, _T.stride]
    + [
        _T.is_contiguous,
        _T.get_device,
        _T.storage_offset,
        torch.is_floating_point,
        torch.numel,
        torch.is_complex,
    ]
)


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread (torch's own FSDP asks the same way)."""
    return torch._C._current_graph_task_id() != -1


def adopt(parameter: nn.Parameter, unit: Unit) -> None:
    """Remember which unit a parameter belongs to. Raises ValueError if it already belongs to a live one."""
    if owner(parameter) is not None:
        raise ValueError("these parameters already belong to an engine: call engine.destroy() on it first")
    _owners[id(parameter)] = unit


def release(parameter: nn.Parameter) -> None:
    """Forget a parameter's unit."""
    _owners.pop(id(parameter), None)


def owner(parameter: Tensor) -> Unit | None:
    """The unit of a parameter, if a live engine manages it."""
    unit = _owners.get(id(parameter))
    return unit if unit is not None and any(p is parameter for p in unit.parameters) else None


def shape_of(parameter: Tensor) -> torch.Size:
    """The true shape of a parameter, also while it is freed."""
    unit = owner(parameter)
    if unit is None:
        return parameter.shape
    return unit.shapes[next(i for i, own in enumerate(unit.parameters) if own is parameter)]


def _watched(values: Any, kind: type[Tensor]) -> Iterator[Tensor]:
    for value in values:
        if type(value) is kind:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _watched(value, kind)


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


class PendingParameter(nn.Parameter):
    """A parameter whose new values are still arriving from the other ranks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return _call(func, args, kwargs)
        for parameter in _watched((*args, *(kwargs or {}).values()), cls):
            unit = owner(parameter)
            if unit is not None:
                unit.ensure_full()
            else:
                parameter.__class__ = nn.Parameter
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        unit = owner(self)
        if unit is not None:
            unit.ensure_full()
        return nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]


class ShardedParameter(nn.Parameter):
    """A parameter whose values are spread over the ranks; it keeps its true dtype and device and, unless
    ``settings`` say otherwise, its true shape.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return _call(func, args, kwargs)
        found = False
        for parameter in _watched((*args, *(kwargs or {}).values()), cls):
            unit = owner(parameter)
            if unit is not None and unit.on_demand is not None:
                found = unit.on_demand(unit) or found
        if found:
            return func(*args, **(kwargs or {}))
        return _call(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        unit = owner(self)
        if unit is not None and unit.provisional and unit.on_demand is not None and unit.on_demand(unit):
            return nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "a model whose parameters are sharded (ZeRO stage 3) cannot be copied: "
            "copy it before zlaunch.initialize, or rebuild it from engine.module.state_dict(), called on "
            "all ranks"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a parameter that is sharded (ZeRO stage 3) cannot be pickled: "
            "save engine.module.state_dict(), called on all ranks, or use engine.save_16bit_model(dir)"
        )
