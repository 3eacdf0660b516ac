"""A unit's beginning and end: where its state and values come to rest, and letting go of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..offload.disk_shard import DiskState, DiskValues
from ..offload.host_gradient import HostGradient
from ..offload.manager import Offload, Place
from . import placeholder

if TYPE_CHECKING:
    from .unit import Unit


def make_state(unit: Unit, own: Tensor, offload: Offload | None) -> None:
    accumulate = torch.promote_types(unit.dtype, torch.float32)
    if unit.state_place is Place.DISK:
        assert offload is not None
        unit.disk = DiskState(offload, own.to(accumulate), unit.cuts)
        unit.gradient_home = unit.disk
    elif unit.state_place is Place.HOST:
        assert offload is not None
        unit.master = offload.empty(own.numel(), accumulate).copy_(own)
        unit.gradient_home = HostGradient(offload.link, unit.cuts)
    elif unit.full.dtype == accumulate and not unit.shard_params:
        unit.master = unit.full[unit.start : unit.stop]
    elif unit.shard_params:
        unit.master = unit.comm.empty(own.numel(), accumulate).copy_(own)
    else:
        unit.master = own.to(accumulate, copy=True)


def make_home(unit: Unit, own: Tensor, offload: Offload | None) -> None:
    place = offload.place_values(own.numel()) if offload is not None else Place.DEVICE
    at_home = unit.master is not None and unit.state_place is place
    if at_home and (place is Place.DEVICE or unit.master.dtype == unit.dtype):  # type: ignore[union-attr]
        unit.home = unit.master
    elif place is Place.DISK:
        assert offload is not None
        unit.home = DiskValues(offload, own)
    elif place is Place.HOST:
        assert offload is not None
        unit.home = offload.empty(own.numel(), unit.dtype).copy_(own)
    else:
        unit.home = unit.comm.empty(own.numel(), unit.dtype).copy_(own)


def hand_over(unit: Unit, parameter: nn.Parameter) -> None:
    """Let go of one parameter of a provisional unit, whose values another unit has copied."""
    index = unit.index_of[id(parameter)]
    placeholder.point(parameter, unit._placeholders[index], unit._own_classes[index])
    placeholder.release(parameter)
    kept = [i for i in range(len(unit.parameters)) if i != index]
    unit.parameters = [unit.parameters[i] for i in kept]
    unit.index_of = {id(p): i for i, p in enumerate(unit.parameters)}
    unit._views = [unit._views[i] for i in kept]
    unit._placeholders = [unit._placeholders[i] for i in kept]
    unit._own_classes = [unit._own_classes[i] for i in kept]
    unit._kinds = [unit._kinds[i] for i in kept]
    unit.shapes = [unit.shapes[i] for i in kept]
    unit.names = [unit.names[i] for i in kept]
    if kept:
        unit.free()
    else:
        unit.full = torch.empty(0, dtype=unit.dtype, device=unit.device)
        unit._storage = unit.full.untyped_storage()
        if unit._offload is not None and isinstance(unit.home, Tensor):
            unit._offload.link.release(unit.home)
        unit.home = None
        if unit.on_empty is not None:
            unit.on_empty()


def abandon(unit: Unit) -> None:
    """Let go of the parameters, whose values are lost."""
    _let_go(unit, unit._placeholders)


def detach(unit: Unit) -> None:
    """Give the parameters independent values of their own again and let go of them."""
    unit.ensure_full()
    _let_go(unit, [view.clone() for view in unit._views])
    unit.full = torch.empty(0, dtype=unit.dtype, device=unit.device)
    unit._views, unit.master, unit.home, unit.grad = [], None, None, None
    unit.disk = unit.gradient_home = None
    unit.generation += 1
    unit.shard_params = False  # it never frees them again


def _let_go(unit: Unit, values: Sequence[Tensor]) -> None:
    unit._point(values, unit._own_classes)
    for parameter in unit.parameters:
        placeholder.release(parameter)


def own_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """The class that a parameter had before any engine."""
    for kind in type(parameter).__mro__:
        if issubclass(kind, nn.Parameter) and not issubclass(kind, placeholder.ManagedParameter):
            return kind
    return nn.Parameter
