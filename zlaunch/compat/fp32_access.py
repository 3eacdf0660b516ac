"""Reads and changes the fp32 value, gradient and optimizer state of single parameters, wherever those are.

DeepSpeed's ``safe_get_*`` and ``safe_set_*`` functions. *Full* ones have the parameter's shape and are
collective; *local* ones are the flat part that this rank updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zlaunch.runtime.checkpoint.format.manifest import VALUE
from zlaunch.runtime.checkpoint.shard_io import (
    Description,
    Fill,
    blocks_of,
    describe,
    take_state,
    take_values,
)
from zlaunch.runtime.engine import Engine, engine_of
from zlaunch.runtime.optim.slices import ShardSlice
from zlaunch.runtime.zero.ownership import STATES
from zlaunch.runtime.zero.unit import Unit, owner_of

_ADAM = ("exp_avg", "exp_avg_sq")


# -- whole


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The fp32 master in the parameter's shape; None for a tensor that no engine trains. Collective."""
    return _full(param, VALUE)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """An optimizer state of the parameter's size (``"exp_avg"``), fp32; zeros before the first step, None
    where there is none. Collective.
    """
    return _full(param, optim_state_key)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The gradient that the next step will use, averaged and unscaled, before clipping; None if there is none
    or if it has not been reduced yet (stages 0 and 1 before the accumulation boundary). Collective.
    """
    found = _find(param)
    if found is None:
        return None
    engine, unit, index = found
    parts = _gradient_parts(engine, unit, index)
    known = engine._sharded.comm.all_reduce_scalars(torch.tensor([float(bool(parts))], device=engine.device))
    if not known.item():
        return None
    return _joined(engine, unit, index, [(at, part / _divisor(engine)) for at, part in parts])


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace the master value, and what the model reads. ``value`` is the same on all ranks. Collective."""
    engine, unit, index = _needed(param)
    flat = _flat(value, unit, index)
    engine._sharded.comm.drain()
    with torch.no_grad():
        if not unit.shard_params:
            unit.wait_unsharded()
        take_values(unit, _filler(unit, index, flat, VALUE))
        if not unit.shard_params:
            slot = unit.layout.slots[index]
            unit.full[slot.offset : slot.stop].copy_(flat)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace an optimizer state. ``value`` is the same on all ranks. Collective. Raises KeyError for a state
    that the optimizer does not keep.
    """
    engine, unit, index = _needed(param)
    _set_state(engine, unit, index, optim_state_key, _flat(value, unit, index))


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replace the gradient that the next step will use (averaged, unscaled). Collective."""
    engine, unit, index = _needed(param)
    _set_gradient(engine, unit, index, _flat(value, unit, index))


def safe_update_full_grad_vectorized(
    param_list: list[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace each gradient by ``update_func(gradient, parameter)``, where there is one."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# -- this rank's part


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's part of the master value, flat fp32."""
    return _local(param, VALUE)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of an optimizer state, flat fp32."""
    return _local(param, optim_state_key)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the averaged, unscaled gradient, flat fp32."""
    found = _find(param)
    if found is None:
        return None
    if _gradient(found[1]) is None:
        return None
    parts = [part for _, part in _gradient_parts(*found)]
    return torch.cat(parts) / _divisor(found[0]) if parts else torch.zeros(0, device=found[0].device)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace this rank's part of the master value. At stages 0 to 2, and for parameters too small to be
    sharded, collective: every rank replaces its own.
    """
    engine, unit, index = _needed(param)
    if not unit.shard_params:
        safe_set_full_fp32_param(param, _spread(engine, unit, index, value))
        return
    flat = _padded(unit, index, value)
    engine._sharded.comm.drain()  # other ranks may still be reading it
    with torch.no_grad():
        take_values(unit, _filler(unit, index, flat, VALUE))


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of an optimizer state."""
    engine, unit, index = _needed(param)
    _set_state(engine, unit, index, optim_state_key, _padded(unit, index, value))


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Replace this rank's part of the gradient."""
    engine, unit, index = _needed(param)
    _set_gradient(engine, unit, index, _padded(unit, index, value))


# -- how


def _find(param: Tensor) -> tuple[Engine, Unit, int] | None:
    engine, unit = engine_of(param), owner_of(param)
    if engine is None or unit is None or not unit.trainable or engine._shard_step is None:
        return None
    unit.check_here(*STATES)
    engine._shard_step.wait()
    if not unit.shard_params:
        unit.wait_unsharded()
        unit.writes.bring()
    return engine, unit, next(i for i, own in enumerate(unit.parameters) if own is param)


def _needed(param: Tensor) -> tuple[Engine, Unit, int]:
    found = _find(param)
    if found is None:
        raise ValueError("this tensor is not a parameter that an engine trains")
    return found


def _flat(value: Tensor, unit: Unit, index: int) -> Tensor:
    slot = unit.layout.slots[index]
    if value.numel() != slot.numel:
        raise ValueError(f"{unit.names[index]} has {slot.numel} elements, the given tensor {value.numel()}")
    return value.detach().reshape(-1)


def _own_range(unit: Unit, index: int) -> tuple[int, int]:
    """The elements of a parameter, from its first, that this rank updates."""
    slot = unit.layout.slots[index]
    low, high = max(unit.start, slot.offset), min(unit.stop, slot.stop)
    return (low - slot.offset, high - slot.offset) if low < high else (0, 0)


def _divisor(engine: Engine) -> float:
    return float(engine.gradient_divisor())


def _own_parts(engine: Engine, unit: Unit, index: int, kind: str) -> Iterator[tuple[int, Tensor]]:
    """This rank's pieces of a state: first element of the parameter, and the elements, in fp32 or wider."""
    step = engine._shard_step
    assert step is not None
    state, slot = step.optimizer.state, unit.layout.slots[index]
    slices = [(part, describe(part, state, "")) for part in step.slices if part.unit is unit]
    for block in blocks_of(unit, "", slices, state, unit.start, unit.stop):
        low, high = max(block.first, slot.offset), min(block.last, slot.stop)
        if low >= high or kind not in block.kinds:
            continue
        with block.open() as pieces:
            flat = torch.cat([piece.detach() for piece in pieces[kind]])
            yield low - slot.offset, flat[low - block.first : high - block.first].clone()


def _full(param: Tensor, kind: str) -> Tensor | None:
    found = _find(param)
    if found is None:
        return None
    engine, unit, index = found
    parts = [(at, part.to(engine.device)) for at, part in _own_parts(engine, unit, index, kind)]
    known = engine._sharded.comm.all_reduce_scalars(torch.tensor([float(bool(parts))], device=engine.device))
    if not known.item() and not (kind in _ADAM and _is_adam(engine)):
        return None
    return _joined(engine, unit, index, parts)


def _joined(engine: Engine, unit: Unit, index: int, parts: list[tuple[int, Tensor]]) -> Tensor:
    """Every rank's parts as one tensor in the parameter's shape; at stage 0 each rank has all of them."""
    dtype = torch.promote_types(unit.dtype, torch.float32)
    full = torch.zeros(unit.layout.slots[index].numel, dtype=dtype, device=engine.device)
    for at, part in parts:
        full[at : at + part.numel()] = part
    if unit.stop - unit.start < unit.numel:
        engine._sharded.comm.all_reduce_scalars(full)
    return full.view(unit.shapes[index])


def _local(param: Tensor, kind: str) -> Tensor | None:
    found = _find(param)
    if found is None:
        return None
    engine, unit, index = found
    parts = [part for _, part in _own_parts(engine, unit, index, kind)]
    if parts:
        return torch.cat(parts)
    low, high = _own_range(unit, index)
    known = kind == VALUE or (kind in _ADAM and _is_adam(engine)) or low == high
    return torch.zeros(high - low, device=engine.device) if known else None


def _padded(unit: Unit, index: int, value: Tensor) -> Tensor:
    """This rank's part, at its place in a flat tensor of the parameter's size."""
    low, high = _own_range(unit, index)
    if value.numel() != high - low:
        raise ValueError(
            f"this rank updates {high - low} elements of {unit.names[index]}, the given tensor has "
            f"{value.numel()}"
        )
    full = torch.zeros(unit.layout.slots[index].numel, dtype=value.dtype, device=value.device)
    full[low:high] = value.detach().reshape(-1)
    return full


def _spread(engine: Engine, unit: Unit, index: int, value: Tensor) -> Tensor:
    full = _padded(unit, index, value).to(engine.device)
    if unit.stop - unit.start < unit.numel:
        engine._sharded.comm.all_reduce_scalars(full)
    return full


def _filler(unit: Unit, index: int, flat: Tensor, wanted: str) -> Fill:
    slot = unit.layout.slots[index]

    def fill(target: Tensor, first: int, kind: str) -> None:
        low, high = max(first, slot.offset), min(first + target.numel(), slot.stop)
        if kind == wanted and low < high:
            target[low - first : high - first].copy_(flat[low - slot.offset : high - slot.offset])

    return fill


def _is_adam(engine: Engine) -> bool:
    return isinstance(engine.torch_optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _set_state(engine: Engine, unit: Unit, index: int, key: str, flat: Tensor) -> None:
    step = engine._shard_step
    assert step is not None
    state, slot = step.optimizer.state, unit.layout.slots[index]
    kept = {name for part in step.slices for name, _ in describe(part, state, "").tensors}
    if key not in kept and not (key in _ADAM and _is_adam(engine)):
        known = ", ".join(sorted(kept)) or "nothing before its first step"
        raise KeyError(f"the optimizer keeps no {key!r} for each element: it keeps {known}")
    slices: list[tuple[ShardSlice, Description]] = []
    for part in step.slices:
        if part.unit is not unit:
            continue
        what = describe(part, state, "")
        touched = unit.start + part.start < slot.stop and unit.start + part.stop > slot.offset
        if touched and what == Description():  # it has made no step yet
            adam = _is_adam(engine)
            names = _ADAM if adam else (key,)
            counter = (("step", ("F32", 0.0)),) if adam else ()
            what = Description(tuple((name, "master") for name in names), counter)
        slices.append((part, what))
    fused = any(group.get("fused") or group.get("capturable") for group in step.optimizer.param_groups)
    take_state(
        unit,
        slices,
        _filler(unit, index, flat, key),
        state,
        fused and engine.device.type != "cpu",
    )


def _gradient_parts(engine: Engine, unit: Unit, index: int) -> list[tuple[int, Tensor]]:
    grad = _gradient(unit)
    low, high = _own_range(unit, index)
    if grad is None or low == high:
        return []
    start = unit.layout.slots[index].offset + low - unit.start
    return [(low, grad[start : start + high - low].to(engine.device, torch.float32, copy=True))]


def _gradient(unit: Unit) -> Tensor | None:
    """Return this rank's shard of the summed gradient, if a backward pass has left one."""
    return unit.store.grad() if unit.store is not None and unit.store.has_grad else None


def _set_gradient(engine: Engine, unit: Unit, index: int, flat: Tensor) -> None:
    grad = _gradient(unit)
    if grad is None:
        raise RuntimeError("there is no gradient yet: call engine.backward first")
    low, high = _own_range(unit, index)
    start = unit.layout.slots[index].offset + low - unit.start
    with torch.no_grad():
        grad[start : start + high - low].copy_(flat[low:high] * _divisor(engine))
    assert unit.store is not None
    unit.store.grad_changed()
