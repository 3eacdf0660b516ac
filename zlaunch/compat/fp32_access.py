"""Reads and changes the fp32 value, gradient and optimizer state of single parameters, wherever those are.

DeepSpeed's ``safe_get_*`` and ``safe_set_*`` functions. *Full* ones have the parameter's shape and are
collective; *local* ones are the flat part that this rank updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zlaunch.runtime.checkpoint.format.manifest import VALUE
from zlaunch.runtime.checkpoint.shard_io import (
    AS_MASTER,
    Described,
    Description,
    Fill,
    blocks_of,
    describe,
    take_state,
    take_values,
)
from zlaunch.runtime.comm.nodes import divides_layers, has_groups
from zlaunch.runtime.engine import Engine, engine_of
from zlaunch.runtime.errors import UnsupportedError
from zlaunch.runtime.optim.in_backward import BackwardStep, check_step
from zlaunch.runtime.optim.step import ShardedOptimizer
from zlaunch.runtime.optim.uncorrected_adam import UncorrectedAdam
from zlaunch.runtime.zero.layout import Slot
from zlaunch.runtime.zero.placeholder import STATES
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
    grad = found.averaged_grad()
    parts = [(found.own_range[0], grad)] if grad is not None and grad.numel() else []
    return found.joined(parts) if found.any_rank_has(parts) else None


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace the master value, and what the model reads. ``value`` is the same on all ranks. Collective."""
    found = _needed(param)
    found.set_value(found.flat(value))


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace an optimizer state. ``value`` is the same on all ranks. Collective. Raises KeyError for a state
    that the optimizer does not keep.
    """
    found = _needed(param)
    found.set_state(optim_state_key, found.flat(value))


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replace the gradient that the next step will use (averaged, unscaled). Collective."""
    found = _needed(param)
    found.set_grad(found.flat(value))


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
    return found.averaged_grad() if found is not None else None


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace this rank's part of the master value. Raises UnsupportedError where groups of ranks share it.

    At stages 0 to 2, and for parameters too small to be sharded, collective: every rank replaces its own.
    """
    found = _alone(param)
    full = found.padded(value)
    found.set_value(full if found.unit.shard_params else found.joined([(0, full)]).view(-1))


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of an optimizer state. Raises as :func:`safe_set_local_fp32_param`."""
    found = _alone(param)
    found.set_state(optim_state_key, found.padded(value))


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Replace this rank's part of the gradient. Raises UnsupportedError where groups of ranks share it."""
    found = _alone(param)
    found.set_grad(found.padded(value))


# -- how


def _alone(param: Tensor) -> _Parameter:
    """Find a parameter whose parts no other rank keeps. Raises UnsupportedError."""
    found = _needed(param)
    if has_groups(found.unit.comm.link):
        raise UnsupportedError(
            "a local shard cannot be set when shards are replicated (shard_group, mics_shard_size, "
            "zero_hpz_partition_size): call "
            "safe_set_full_fp32_param or safe_set_full_optimizer_state on all ranks"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Parameter:
    """Reads and changes what is kept for a parameter that an engine trains."""

    engine: Engine
    unit: Unit
    index: int
    """Counts the unit's parameters before it."""

    @property
    def slot(self) -> Slot:
        return self.unit.layout.slots[self.index]

    @property
    def step(self) -> ShardedOptimizer:
        assert self.engine._shard_step is not None
        return self.engine._shard_step

    @property
    def own_range(self) -> tuple[int, int]:
        """Return the elements of the parameter, from its first, that this rank updates."""
        low = max(self.unit.start, self.slot.offset)
        high = min(self.unit.stop, self.slot.stop)
        return (low - self.slot.offset, high - self.slot.offset) if low < high else (0, 0)

    def described(self) -> list[Described]:
        """Describe what the optimizer keeps for each slice of the unit."""
        state = self.step.optimizer.state
        return [(part, describe(part, state, "")) for part in self.step.slices if part.unit is self.unit]

    def starts_with_zeros(self, kind: str) -> bool:
        """Tell whether the optimizer has such a state, even if it has made no step yet."""
        return kind in _ADAM and self.is_adam

    @property
    def is_adam(self) -> bool:
        return isinstance(self.engine.torch_optimizer, (torch.optim.Adam, torch.optim.AdamW, UncorrectedAdam))

    # -- read

    def own_parts(self, kind: str) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's pieces of a state: first element of the parameter, and the elements, in fp32 or
        wider.
        """
        unit = self.unit
        slot = self.slot
        state = self.step.optimizer.state
        for block in blocks_of(unit, "", self.described(), state, unit.start, unit.stop):
            low = max(block.first, slot.offset)
            high = min(block.last, slot.stop)
            if low >= high or kind not in block.kinds:
                continue
            with block.open() as pieces:
                flat = torch.cat([piece.detach() for piece in pieces[kind]])
                yield low - slot.offset, flat[low - block.first : high - block.first].clone()

    def own_grad(self) -> Tensor | None:
        """View this rank's part of the summed gradient, if a backward pass has left one."""
        store = self.unit.store
        if self.unit.gradients is not None and isinstance(self.unit.gradients.consumer, BackwardStep):
            raise UnsupportedError(
                f"the gradient of {self.unit.names[self.index]} cannot be read or set: "
                "zero_optimization.step_in_backward uses and frees it inside the backward pass"
            )
        if store is None or not store.has_grad:
            return None
        if self.unit.gradients is not None and self.unit.gradients.skips_reduction:
            raise UnsupportedError(
                f"the gradient of {self.unit.names[self.index]} cannot be read or set: in compressed "
                "steps each rank has its own gradients, and no rank has their average"
            )
        low, high = self.own_range
        start = self.slot.offset + low - self.unit.start
        return store.grad()[start : start + high - low]

    def averaged_grad(self) -> Tensor | None:
        """Copy this rank's part of the gradient that the next step will use, flat fp32."""
        grad = self.own_grad()
        return grad.to(self.engine.device, torch.float32) / self.divisor if grad is not None else None

    @property
    def divisor(self) -> float:
        return float(self.engine.gradient_divisor())

    def any_rank_has(self, parts: Sequence[object]) -> bool:
        """Tell whether there are such parts on any rank. Collective."""
        count = torch.tensor([float(bool(parts))], device=self.engine.device)
        return bool(self.engine.comm.all_reduce_scalars(count).item())

    def joined(self, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Sum every rank's parts to one tensor in the parameter's shape; at stage 0 each rank has all of
        them.
        """
        unit = self.unit
        dtype = torch.promote_types(unit.dtype, torch.float32)
        full = torch.zeros(self.slot.numel, dtype=dtype, device=self.engine.device)
        comm = self.engine.comm
        is_sharded = unit.stop - unit.start < unit.numel
        if not is_sharded or comm.rank < comm.link.shards:
            for at, part in parts:
                full[at : at + part.numel()] = part
        if is_sharded:
            comm.all_reduce_scalars(full)
        return full.view(unit.shapes[self.index])

    # -- change

    def flat(self, value: Tensor) -> Tensor:
        """Flatten a value for the whole parameter. Raises ValueError for another size."""
        if value.numel() != self.slot.numel:
            raise ValueError(
                f"{self.unit.names[self.index]} has {self.slot.numel} elements, the given tensor "
                f"{value.numel()}"
            )
        return value.detach().reshape(-1)

    def padded(self, value: Tensor) -> Tensor:
        """Return a value for this rank's part, at its place in a flat tensor of the parameter's size. Raises
        ValueError for another size.
        """
        low, high = self.own_range
        if value.numel() != high - low:
            raise ValueError(
                f"this rank updates {high - low} elements of {self.unit.names[self.index]}, but the "
                f"given tensor has {value.numel()}"
            )
        full = torch.zeros(self.slot.numel, dtype=value.dtype, device=value.device)
        full[low:high] = value.detach().reshape(-1)
        return full

    def set_value(self, flat: Tensor) -> None:
        unit = self.unit
        slot = self.slot
        self.engine.comm.drain()  # other ranks may still be reading it
        with torch.no_grad():
            if not unit.shard_params:
                unit.wait_unsharded()
            take_values(unit, self._filler(flat, VALUE))
            if not unit.shard_params:
                unit.full[slot.offset : slot.stop].copy_(flat)

    def set_state(self, key: str, flat: Tensor) -> None:
        state = self.step.optimizer.state
        slot = self.slot
        unit = self.unit
        kept = {name for part in self.step.slices for name, _ in describe(part, state, "").tensors}
        if key not in kept and not self.starts_with_zeros(key):
            known = ", ".join(sorted(kept)) or "nothing before its first step"
            raise KeyError(f"the optimizer has no per-element state {key!r}: its states are {known}")
        names = _ADAM if self.is_adam else (key,)
        counter = (("step", ("F32", 0.0)),) if self.is_adam else ()
        fresh = Description(tuple((name, AS_MASTER) for name in names), counter)
        slices: list[Described] = []
        for part, what in self.described():
            touched = unit.start + part.start < slot.stop and unit.start + part.stop > slot.offset
            has_no_step = touched and what == Description()
            slices.append((part, fresh if has_no_step else what))
        take_state(unit, slices, self._filler(flat, key), self.step.optimizer)
        self.step.state_changed()

    def _filler(self, flat: Tensor, wanted: str) -> Fill:
        slot = self.slot

        def fill(target: Tensor, first: int, kind: str) -> None:
            low = max(first, slot.offset)
            high = min(first + target.numel(), slot.stop)
            if kind == wanted and low < high:
                target[low - first : high - first].copy_(flat[low - slot.offset : high - slot.offset])

        return fill

    def set_grad(self, flat: Tensor) -> None:
        if self.own_grad() is None:
            raise RuntimeError("there is no gradient yet: call engine.backward first")
        assert self.unit.gradients is not None
        self.unit.gradients.widen(self.unit)
        grad = self.own_grad()
        assert grad is not None
        low, high = self.own_range
        with torch.no_grad():
            grad.copy_(flat[low:high] * self.divisor)
        assert self.unit.store is not None
        self.unit.store.grad_changed()


def _find(param: Tensor) -> _Parameter | None:
    """Find a parameter's engine and unit, once what is under way has ended; None if no engine trains it."""
    engine = engine_of(param)
    unit = owner_of(param)
    if engine is None or unit is None or not unit.trainable or engine._shard_step is None:
        return None
    if divides_layers(unit.comm):
        raise UnsupportedError(
            f"single values and gradients of {unit.names[0]} and others cannot be read or set under tensor "
            "parallelism yet: use engine.module.state_dict(), load_state_dict(), or checkpoints"
        )
    unit.check_on_device(*STATES)
    check_step(unit)
    engine._shard_step.wait()
    if not unit.shard_params:
        unit.wait_unsharded()
        unit.writes.sync_to_masters()
    return _Parameter(engine, unit, next(i for i, own in enumerate(unit.parameters) if own is param))


def _needed(param: Tensor) -> _Parameter:
    found = _find(param)
    if found is None:
        raise ValueError("this tensor is not a parameter that an engine trains")
    return found


def _full(param: Tensor, kind: str) -> Tensor | None:
    found = _find(param)
    if found is None:
        return None
    parts = list(found.own_parts(kind))
    return found.joined(parts) if found.any_rank_has(parts) or found.starts_with_zeros(kind) else None


def _local(param: Tensor, kind: str) -> Tensor | None:
    found = _find(param)
    if found is None:
        return None
    parts = [part for _, part in found.own_parts(kind)]
    if parts:
        return torch.cat(parts)
    low, high = found.own_range
    known = kind == VALUE or found.starts_with_zeros(kind) or low == high
    return torch.zeros(high - low, device=found.engine.device) if known else None
