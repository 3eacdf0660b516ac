"""Defines the classes that a parameter takes on while an engine manages it.

torch itself changes a parameter's class in place (``UninitializedParameter.materialize``). A managed
parameter is a view of its unit's flat buffer, and what a script does to it has to reach the unit:

- :class:`ManagedParameter`: the values are there. ``grad`` and ``data`` are watched, nothing else costs
  anything.
- :class:`PendingParameter`: the all-gather after an optimizer step is under way. The first touch waits for
  it.
- :class:`ShardedParameter`: sharded. Inside a forward or backward pass of its model a use that no module hook
  announced gathers the unit on demand. Outside, reading gives NaN, while writing, and anything that a
  gradient would have to flow through, raises (see ``placeholder.py``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import OffloadedError, ParameterError
from .tensors import tensors_in

if TYPE_CHECKING:
    from .unit import Unit

# -- ownership --------------------------------------------------------------------------------------
#
# Defines what a parameter, and the code that watches it, needs to know of its unit.


OPTIMIZER, MASTERS, VALUES, GRADIENTS, BUFFERS = STATES = (
    "optim_states",
    "hp_params",
    "lp_params",
    "lp_grads",
    "contiguous_grad_buffer",
)
"""Lists DeepSpeed's names for what can be moved to host memory for a while: the optimizer's state, the fp32
masters, what the model computes with, the reduced gradients, and the gradients' send buffers.
"""


class UnitState(Enum):
    """Says where the values of a unit's parameters are."""

    UNSHARDED = auto()
    """Means that every rank has all values; the parameters are views of the flat buffer."""
    GATHERING = auto()
    """Means that a collective is filling the flat buffer."""
    SHARDED = auto()
    """Means that only each rank's slice exists; the parameters are placeholders."""
    AWAY = auto()
    """Means that an unsharded unit's values are in host memory; the parameters are placeholders."""


def check_on_device(offloaded: Collection[str], needed: Sequence[str], what: str) -> None:
    """Raise OffloadedError if a state that ``what`` needs is off the device."""
    missing = [name for name in needed if name in offloaded]
    if missing:
        raise OffloadedError(
            f"{what} needs {', '.join(missing)}, which engine.offload_states() moved to host memory: "
            "call engine.reload_states() on all ranks first"
        )


# -- sharded reads ----------------------------------------------------------------------------------
#
# Lets a script read a sharded parameter, as NaN, outside a pass of its model, and refuses other uses.


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
        self._addresses = addresses
        self._name = name

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
            # Integers have no NaN: the result (an index, a count) would look like a real one.
            if not tensor.is_floating_point() and tensor.dtype is not torch.bool:
                raise ParameterError(f"cannot return {tensor.dtype} values: {remedy(name)}")
        # NumPy would write to the placeholder's memory, and nothing would see it.
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


# -- placeholder ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Settings:
    """Sets how managed parameters look in this process."""

    empty_placeholders: bool = False
    """Gives a sharded parameter no elements, as DeepSpeed does, instead of its true shape full of NaN."""
    lenient: bool = False
    """Makes ``grad`` None where the engine has taken the gradient, loses a change of a gathered parameter,
    and leaves a model that is moved on its device (Lightning's teardown moves it to the CPU), each with a
    warning instead of an error; DeepSpeed says nothing.
    """


settings = Settings()
_owners: WeakValueDictionary[int, Unit] = WeakValueDictionary()
"""Maps a parameter's id to its unit. Not an attribute of the parameter: that would be pickled with it."""

_T = Tensor
GRAD: Any = _T.grad
DATA: Any = _T.data
_METADATA_GETTERS = (
    *("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "layout"),
    *("is_cuda", "is_sparse", "is_meta", "_version", "grad_dtype", "is_quantized", "is_cpu", "itemsize"),
    *("nbytes", "names", "_backward_hooks", "retains_grad"),
)
_METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(_T, name).__get__ for name in _METADATA_GETTERS if hasattr(_T, name)),
        *(GRAD.__set__, _T.requires_grad.__set__),  # type: ignore[attr-defined]
        *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.element_size, _T.stride),
        *(_T.is_floating_point, _T.is_complex, torch.is_floating_point, torch.is_complex, torch.numel),
        *(_T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.__hash__),
        *(_T.is_contiguous, _T.get_device, _T.storage_offset),
    ]
)
"""Lists what may be asked of a parameter without its values."""


def in_backward() -> bool:
    """Tell whether the autograd engine is running in this thread (torch's FSDP asks likewise)."""
    return backward_number() != -1


def backward_number() -> int:
    """Return the number of the backward pass that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()


def adopt(parameter: nn.Parameter, unit: Unit) -> None:
    """Record which unit a parameter belongs to. Raises ValueError if it already belongs to a live one."""
    if owner(parameter) is not None:
        raise ValueError("these parameters already belong to an engine: call its destroy() first")
    _allow_aliases()
    _owners[id(parameter)] = unit


def release(parameter: nn.Parameter) -> None:
    """Forget a parameter's unit."""
    _owners.pop(id(parameter), None)


def owner(parameter: Tensor) -> Unit | None:
    """Return the unit of a parameter, if a live engine manages it."""
    unit = _owners.get(id(parameter))
    return unit if unit is not None and id(parameter) in unit.index_of else None


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the true shape of a parameter, also while it is sharded."""
    unit = owner(parameter)
    return parameter.shape if unit is None else unit.shapes[unit.index_of[id(parameter)]]


def name_of(parameter: Tensor) -> str:
    """Return the name of a managed parameter in its model."""
    unit = owner(parameter)
    return "a parameter" if unit is None else unit.names[unit.index_of[id(parameter)]]


def point(parameter: nn.Parameter, tensor: Tensor, kind: type[nn.Parameter]) -> None:
    """Give a parameter other memory and the class ``kind``; keep its version counter."""
    parameter.__class__ = nn.Parameter  # a guarded class would refuse
    parameter.data = tensor
    parameter.__class__ = kind


@cache
def _allow_aliases() -> None:
    """Let ``nn.Parameter(parameter)`` take a managed parameter from now on: weight norm makes its direction
    so while a model is built. torch tells by the class alone whether it may.
    """
    new = nn.Parameter.__new__

    @wraps(new)
    def make(cls: type[nn.Parameter], data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
        if isinstance(data, ManagedParameter):
            data = data.detach()
        if isinstance(data, FreedView):
            _object(f"a parameter made of NaN: {remedy(data.parameter_name)}")
        return new(cls, data, requires_grad)

    nn.Parameter.__new__ = make  # type: ignore[method-assign,assignment]


def move_versions(parameters: Sequence[Tensor]) -> None:
    """Tell autograd that parameters have been changed in place."""
    try:
        torch.autograd.graph.increment_version(parameters)
    except TypeError:  # torch 2.6 takes one tensor at a time
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)


def _of_kind(kind: type[Tensor], *given: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(given) if isinstance(tensor, kind)]


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _asked_by_torch() -> bool:
    """Tell whether torch's machinery (a compiler looking at its inputs), not a script, reads ``grad``."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch._")


class ManagedParameter(nn.Parameter):
    """Is a view of a unit's flat buffer, with its values in place."""

    @property
    def grad(self) -> Tensor | None:
        """Return a gradient that autograd has left; raises ParameterError if the engine has taken it."""
        own: Tensor | None = GRAD.__get__(self)
        if own is None:
            unit = owner(self)
            if unit is not None and unit.hides_gradient(self) and not _asked_by_torch():
                _hidden(name_of(self))
        return own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        unit = owner(self)
        if unit is not None and unit.trainable:
            if value is not None:
                raise ParameterError(
                    f"{name_of(self)}.grad cannot be assigned: the engine owns gradients. Between "
                    "engine.backward and engine.step, use zlaunch.safe_set_full_grad(parameter, value)"
                )
            # A script that sets grad to None means the engine's sum, too.
            unit.forget_gradient(self)
        GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """Return the values, outside autograd; what is written to them reaches the master values."""
        unit = owner(self)
        if unit is not None:
            unit.expose()
        return DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        unit = owner(self)
        if unit is None:
            DATA.__set__(self, value)
            return
        is_built = unit.provisional and unit.on_demand is not None and unit.on_demand(unit)
        present = DATA.__get__(self)
        same = isinstance(value, Tensor) and present.dtype == value.dtype and present.shape == value.shape
        if same and is_built:
            # code that builds a model pads or initializes values so; it does not put former ones back later
            present.copy_(value)
            return
        if is_built and settings.empty_placeholders and isinstance(value, Tensor) and not value.numel():
            return  # computed from the shapes of empty placeholders, as transformers pads a tied layer's bias
        # Setting the same memory again is allowed: code that swaps values and puts them back ends with that.
        if not same or present.data_ptr() != value.data_ptr() or present.stride() != value.stride():
            raise ParameterError(
                f"{name_of(self)}.data cannot be replaced: the engine owns the parameter's memory. Write in "
                "place: `with torch.no_grad(): parameter.copy_(values)`, at stage 3 inside `with "
                "zlaunch.zero.GatheredParameters([parameter], modifier_rank=0):`. To restore old values "
                "later, clone them"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        # A plain parameter: the copy belongs to no unit. DATA, because the property would mark the unit as
        # written to.
        values = DATA.__get__(self).clone(memory_format=torch.preserve_format)
        memo[id(self)] = copied = nn.Parameter(values, self.requires_grad)
        return copied


def _hidden(name: str) -> None:
    text = (
        f"{name}.grad is not available: the engine owns gradients. To clip, set gradient_clipping in the "
        "config (max_grad_norm of zlaunch.prepare). For the norm, read engine.grad_norm after "
        "the step. To read or change gradients before it, use zlaunch.safe_get_full_grad(parameter) and "
        "zlaunch.safe_set_full_grad(parameter, value) (not with step_in_backward). "
        "Leave out torch's GradScaler: fp16.enabled scales the loss"
    )
    _object(text)


def complain(name: str) -> None:
    """Raise ParameterError, or warn if ``settings`` are lenient: a change of a gathered parameter is lost."""
    text = (
        f"{name} was changed in place while gathered (ZeRO stage 3), and the change is lost: use "
        "`with zlaunch.zero.GatheredParameters([parameter], modifier_rank=0):` outside the forward pass"
    )
    _object(text)


def complain_of_move(device: torch.device, other: torch.device) -> None:
    """Raise ParameterError, or warn if ``settings`` are lenient: a model stays where its engine has it."""
    _object(
        f"this model belongs to a zlaunch engine and stays on {device}, not {other}: move it "
        "before zlaunch.initialize or after engine.destroy()"
    )


def _object(text: str) -> None:
    if not settings.lenient:
        raise ParameterError(text)
    warnings.warn(text, stacklevel=4)


class PendingParameter(ManagedParameter):
    """Waits, at its first use, for new values that are still arriving from the other ranks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return _call(func, args, kwargs)
        for parameter in _of_kind(PendingParameter, args, kwargs):
            unit = owner(parameter)
            if unit is not None:
                unit.wait_unsharded()
            else:
                parameter.__class__ = nn.Parameter
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        unit = owner(self)
        if unit is not None:
            unit.wait_unsharded()
        return ManagedParameter.__deepcopy__(self, memo)


class ShardedParameter(ManagedParameter):
    """Stands for values that are spread over the ranks; keeps its true dtype and device and, unless
    ``settings`` say otherwise, its true shape.
    """

    is_placeholder = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return _call(func, args, kwargs)
        found = False
        touched = _of_kind(ShardedParameter, args, kwargs)
        for parameter in touched:
            unit = owner(parameter)
            if unit is not None and unit.on_demand is not None:
                found = unit.on_demand(unit) or found
        if found:
            return func(*args, **(kwargs or {}))
        return read_freed(func, args, kwargs or {}, name_of(touched[0]) if touched else "a parameter")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        unit = owner(self)
        if unit is not None and unit.provisional and unit.on_demand is not None and unit.on_demand(unit):
            return ManagedParameter.__deepcopy__(self, memo)
        raise ParameterError(
            "a model with sharded parameters (ZeRO stage 3) cannot be copied: copy it before "
            "zlaunch.initialize, or rebuild it from engine.module.state_dict(), called on all ranks"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParameterError(
            "a sharded parameter (ZeRO stage 3) cannot be pickled: "
            "save engine.module.state_dict(), called on all ranks, or use engine.save_16bit_model(dir)"
        )


def own_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that a parameter had before any engine."""
    for kind in type(parameter).__mro__:
        if issubclass(kind, nn.Parameter) and not issubclass(kind, ManagedParameter):
            return kind
    return nn.Parameter


@dataclass(frozen=True, slots=True)
class Kinds:
    """Names the classes of one parameter through its life under an engine."""

    managed: type[nn.Parameter]
    pending: type[nn.Parameter]
    sharded: type[nn.Parameter]


@cache
def kinds_for(own: type[nn.Parameter]) -> Kinds:
    """Return the guarded classes for a parameter's class, ``nn.Parameter`` or a subclass."""
    if own is nn.Parameter:
        return Kinds(ManagedParameter, PendingParameter, ShardedParameter)

    # A script may ask for its class, so each derives from that; FSDP2 derives from a module's class so.
    class ManagedSubclass(ManagedParameter, own):  # type: ignore[misc, valid-type]
        """A managed parameter of the script's own class."""

    class PendingSubclass(PendingParameter, own):  # type: ignore[misc, valid-type]
        """A pending parameter of the script's own class."""

    class ShardedSubclass(ShardedParameter, own):  # type: ignore[misc, valid-type]
        """A sharded parameter of the script's own class."""

    return Kinds(ManagedSubclass, PendingSubclass, ShardedSubclass)
