"""Sharded parameters as DeepSpeed scripts see them: empty outside a context, with ``ds_*`` attributes.

:func:`use_deepspeeds_placeholders` is called by what may shard first: ``zero.Init`` and ``initialize``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zlaunch.runtime.comm.nodes import has_groups
from zlaunch.runtime.config import load
from zlaunch.runtime.engine import engine_of
from zlaunch.runtime.errors import UnsupportedError
from zlaunch.runtime.log import warn
from zlaunch.runtime.precision import choose_precision
from zlaunch.runtime.zero import placeholder
from zlaunch.runtime.zero.placeholder import VALUES, UnitState
from zlaunch.runtime.zero.policy import Kind, is_leaf, mark_leaves
from zlaunch.runtime.zero.unit import Unit, owner_of
from zlaunch.zero import GatheredParameters as _GatheredParameters
from zlaunch.zero import Init as _Init

# -- parameters -------------------------------------------------------------------------------------


class ZeroParamType(Enum):
    """How a parameter is kept."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether a sharded parameter's values are there."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {
    UnitState.UNSHARDED: ZeroParamStatus.AVAILABLE,
    UnitState.GATHERING: ZeroParamStatus.INFLIGHT,
    UnitState.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    UnitState.AWAY: ZeroParamStatus.NOT_AVAILABLE,
}


def _unit(parameter: Tensor) -> Unit:
    """Return a parameter's unit. Raises AttributeError, which makes ``hasattr`` say no, where stage 3 does
    not manage it.
    """
    unit = owner_of(parameter)
    if unit is None or not unit.stage3:
        raise AttributeError("not a parameter of ZeRO stage 3")
    return unit


def _index(parameter: Tensor) -> int:
    return next(i for i, own in enumerate(_unit(parameter).parameters) if own is parameter)


def _shape(parameter: Tensor) -> torch.Size:
    return _unit(parameter).shapes[_index(parameter)]


def _numel(parameter: Tensor) -> int:
    return _shape(parameter).numel()


def _own(parameter: Tensor) -> Tensor:
    """Return this rank's part, flat; on disk it has no memory here and is read."""
    unit = _unit(parameter)
    unit.check_on_device(VALUES)
    slot = unit.layout.slots[_index(parameter)]
    if has_groups(unit.comm.link) and unit.shard_params:
        raise UnsupportedError(
            "ds_tensor is not available when shards are replicated (shard_group, "
            "mics_shard_size, zero_hpz_partition_size): use GatheredParameters"
        )
    start, stop = unit.layout.shard_range(unit.comm.link.position)
    low = max(start, slot.offset)
    high = min(stop, slot.stop)
    if low >= high:
        return torch.empty(0, dtype=unit.dtype, device=unit.device)
    if not unit.shard_params:
        return parameter.data.reshape(-1)[low - slot.offset : high - slot.offset]
    if unit.values.tensor is not None:
        return unit.values.tensor.detach()[low - start : high - start]
    with unit.values.read() as values:
        return values[low - start : high - start].clone()


def _all_gather(parameter: Tensor, param_list: Iterable[Tensor] | None = None, **ignored: Any) -> None:
    """Bring the values here until ``partition``. Collective."""
    for each in [parameter] if param_list is None else param_list:
        unit = _unit(each)
        if id(unit) not in _held:
            _held[id(unit)] = stack = ExitStack()
            stack.enter_context(unit.hold())


def _partition(
    parameter: Tensor,
    param_list: Iterable[Tensor] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Free the values that ``all_gather`` has brought, unless they are to stay for a while.
    ``has_been_updated``: they were changed, on all ranks alike, and the change is to be kept.
    """
    for each in [parameter] if param_list is None else param_list:
        unit = _unit(each)
        if has_been_updated and unit.state is UnitState.UNSHARDED:
            unit.write_back()
        if free_data:
            if id(unit) in _held:
                _held.pop(id(unit)).close()
            unit.reshard()


_held: dict[int, ExitStack] = {}
_PROPERTIES: dict[str, Callable[[Tensor], Any]] = {
    "ds_id": lambda p: (_unit(p), id(p))[1],
    "ds_shape": _shape,
    "ds_numel": _numel,
    "ds_status": lambda p: _STATUS[_unit(p).state],
    "ds_param_type": lambda p: ZeroParamType.PARTITIONED if _unit(p).shard_params else ZeroParamType.NORMAL,
    "ds_tensor": _own,
    "ds_persist": lambda p: not _unit(p).shard_params,
    "ds_process_group": lambda p: (_unit(p), dist.group.WORLD)[1],
    "ds_zero_param_process_group": lambda p: (_unit(p), dist.group.WORLD)[1],
    "ds_active_sub_modules": lambda p: (
        set() if _unit(p).state in (UnitState.SHARDED, UnitState.AWAY) else {0}
    ),
    "partition_numel": lambda p: lambda: -(-_numel(p) // _unit(p).comm.link.shards),
    "all_gather": lambda p: (_unit(p), lambda *args, **kw: _all_gather(p, *args, **kw))[1],
    "partition": lambda p: (_unit(p), lambda *args, **kw: _partition(p, *args, **kw))[1],
}


def use_deepspeeds_placeholders() -> None:
    """Let freed parameters be empty from now on, as in DeepSpeed, instead of keeping their shape, and give
    them ``ds_*`` attributes.
    """
    if placeholder.settings.empty_placeholders:
        return
    placeholder.settings.empty_placeholders = True
    placeholder.settings.lenient = True
    for name, get in _PROPERTIES.items():
        setattr(nn.Parameter, name, property(_unwatched(get)))
    nn.Module.ds_external_parameters = _external_parameters  # type: ignore[attr-defined]


def _external_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return no parameter: those that another module's forward uses need no record (TRL asks for them)."""
    return iter(())


def _unwatched(get: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def read(parameter: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return get(parameter)

    return read


class Init(_Init):
    """``deepspeed.zero.Init``: the runtime's; parameters take the config's fp16 or bf16 at once, and without
    ``dtype`` and config fp16, as in DeepSpeed.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | str | None = None,
        mpu: Any = None,
        **ignored: Any,
    ) -> None:
        use_deepspeeds_placeholders()
        source = config if config is not None else config_dict_or_path
        if dtype is None and enabled:
            dtype = choose_precision(load(source).config).dtype if source is not None else torch.float16
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            None,
            source,
            enabled,
            dtype,
            mpu,
            **ignored,
        )


class GatheredParameters:
    """``deepspeed.zero.GatheredParameters``: the runtime's, for parameters of stage 3 alone. It can be
    entered again and again.
    """

    def __init__(
        self,
        params: Tensor | nn.Module | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, Tensor):
            params = [params]
        self.enabled = enabled
        self.src_rank = modifier_rank
        self.params = [p for p in params if is_zero_param(p)] if enabled else []
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = _GatheredParameters(self.params, self.src_rank)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def is_zero_param(parameter: Any) -> bool:
    """Tell whether stage 3 manages a parameter."""
    return isinstance(parameter, nn.Parameter) and hasattr(parameter, "ds_id")


def register_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Do nothing: a parameter that another module's forward uses is gathered when it is touched. Raises
    RuntimeError for something that is not a parameter.
    """
    if not isinstance(parameter, Tensor):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Do nothing: there is nothing to undo."""
    register_external_parameter(module, parameter)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Give the plain module with all of its values, for generation that calls it often. Collective."""
    module = getattr(model, "module", model)
    with GatheredParameters(list(module.parameters())):
        yield module


# -- leaf modules -----------------------------------------------------------------------------------
#
# DeepSpeed's functions for modules that stage 3 gathers as one; call them before ``initialize``.


_Marked = tuple[list[nn.Module], list[str]]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Kind] | Kind, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark and return the modules of these classes, or names of classes. Raises ValueError if there are
    none.
    """
    return _of_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Kind] | Kind, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark and return the modules of these classes. Raises ValueError if there are none."""
    return _of_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> _Marked:
    """Mark modules by their names in the model; ``flag`` False unmarks them. Return them, and the names that
    no module has. Raises ValueError if there are such names.
    """
    return _all_found(mark_leaves(model, names=module_names, flag=flag), raise_if_not_found, "is named")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> _Marked:
    """Mark modules by the ends of their names in the model; ``flag`` False unmarks them. Return them, and the
    ends that no name has. Raises ValueError if there are such ends.
    """
    marked = mark_leaves(model, suffixes=module_name_suffixes, flag=flag)
    return _all_found(marked, raise_if_not_found, "has a name that ends in")


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    set_z3_leaf_modules_by_name(model, [""], flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if is_leaf(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Tell whether a module is marked."""
    return is_leaf(model)


def z3_leaf_parameter(model: Tensor) -> bool:
    """Tell whether a parameter belongs to a marked module of an engine's model at stage 3."""
    engine = engine_of(model)
    if engine is None or engine.zero_optimization_stage() < 3:
        return False
    return any(model is own for module in get_z3_leaf_modules(engine.module) for own in module.parameters())


def _of_classes(
    model: nn.Module, classes: Iterable[Kind] | Kind, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found, missing = mark_leaves(model, classes=classes, flag=flag)
    if not found and raise_if_not_found:
        raise ValueError(f"no module of the model is one of {missing}")
    _warn_if_late(found)
    marked = {id(module) for module in found}
    ordered = []
    model.apply(lambda module: ordered.append(module) if id(module) in marked else None)
    return ordered


def _all_found(marked: _Marked, raise_if_not_found: bool, what: str) -> _Marked:
    found, missing = marked
    if missing and raise_if_not_found:
        raise ValueError(f"no module of the model {what} one of {missing}")
    _warn_if_late(found)
    return marked


def _warn_if_late(found: Iterable[nn.Module]) -> None:
    firsts = (next(module.parameters(), None) for module in found)
    if any(first is not None and engine_of(first) is not None for first in firsts):
        warn("leaf modules were marked after initialize: they count from the next initialize on")
