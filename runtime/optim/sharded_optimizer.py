"""Steps the flat shards of all units, and brings the new values to where gathers read.

That is ``ValueStore.write`` for each unit, and ``Unit.refresh`` for one that stays unsharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from ...cuda_ops.arguments import Scalar
from ...cuda_ops.norm import prepare_step
from .. import preemption
from ..comm.collectives import Comm
from ..precision.step_result import StepResult
from ..profiler import named
from ..small_copies import all_on, to_device
from ..zero.reduce import GradientReducer
from ..zero.store import DeviceStore, squares_of
from ..zero.unit import Unit
from .initial_state import give_initial_state, take_initial_state
from .inner_optimizer import InnerOptimizer, has_hooks, run_hooks
from .slices import Label, ShardSlice, make_slices, separate_unused, split_slices
from .update_rule import SliceUpdate, UpdateRule


class OffloadedStep(Protocol):
    """Steps units in another way than all that are on the device at once: in the background, or together."""

    by_parameter: bool
    """Tells whether it wants slices of one parameter each."""

    def takes(self, unit: Unit) -> bool:
        """Tell whether it steps ``unit``."""

    def forget(self) -> None:
        """Forget what belongs to a state that has been replaced. All ranks do, in the same step."""

    def own_squares(self) -> list[Tensor]:
        """Return sums of squares that make the norm in place of the stores' gradients, if any do."""

    def start(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Do the step, or begin it. Raises DiskError if it was done at once.

        ``used``: for each parameter of each unit, in order, whether some rank had a gradient for it; equal on
        all ranks, unlike ``slices``.
        """

    def brings(self, unit: Unit) -> bool:
        """Tell whether the new values of ``unit`` come without a refresh by the caller."""

    def check(self) -> None:
        """Raise what ended a step early."""

    def finish(self) -> None:
        """Raise what ended the last step early, if it has not been raised yet: no other step will follow."""

    def wait(self) -> None:
        """Wait until the step has ended, uploads included. Raises what ended it early."""


class ShardedOptimizer:
    """Steps this rank's shards by the rule of a torch optimizer over the model's parameters.

    That optimizer stays the caller's (schedulers keep working, ``param_groups`` stay live); an inner one of
    its class, :attr:`optimizer`, has the shards in its groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        reducer: GradientReducer,
        comm: Comm,
        *,
        whole: bool = False,
        offloaded_step: Callable[[Sequence[Unit]], OffloadedStep] | None = None,
        on_device: bool = False,
    ) -> None:
        """Prepare to step ``units``. ``whole``: the optimizer gets whole tensors, which this rank must have.
        ``offloaded_step`` is made for the units if it takes some of them; they may be replaced later.
        ``on_device``: decisions are made there where that is possible, so that the host never waits for it.
        """
        self._initial, self._inner = take_initial_state(optimizer), InnerOptimizer(optimizer)
        self.optimizer = self._inner.optimizer
        self.units = list(units)
        self._reducer, self._comm, self._whole = reducer, comm, whole
        self._slices: list[ShardSlice] = []
        self.stepper = offloaded_step(self.units) if offloaded_step is not None else None
        self._on_device = on_device
        self._state_changed = False
        """Tells that this rank's state has been replaced since the last step."""
        self._take_units(units)
        self._rule = UpdateRule(self.optimizer)

    @property
    def outer(self) -> torch.optim.Optimizer:
        """Return the optimizer that the script holds."""
        return self._inner.outer

    def _take_units(self, units: Sequence[Unit]) -> None:
        """Make the slices of units and add them to the optimizer's groups."""
        made = make_slices(units, self._whole)
        self._slices += made
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] += [part.leaf for part in made if part.group == index and part.leaf is not None]
        if self.stepper is not None and self.stepper.by_parameter:
            self.split(lambda unit, index: (id(unit), index))
        give_initial_state(self.optimizer, self._initial, made)
        self.decides_on_device = self._choose_fused() and self._on_device and self.stepper is None

    def set_units(self, units: Sequence[Unit]) -> None:
        """Replace the units that are stepped: those that stay keep their state, new ones begin without. Those
        that are gone had no state. Further param groups are taken from the outer optimizer.
        """
        self.wait()
        further = self.outer.param_groups[len(self.optimizer.param_groups) :]
        self._inner.add_groups(further)
        self._initial += [self._initial[0] if self._initial else {} for _ in further]
        new = [unit for unit in units if all(unit is not old for old in self.units)]
        gone = [old for old in self.units if all(old is not unit for unit in units)]
        self._slices = [part for part in self._slices if all(part.unit is not unit for unit in gone)]
        self.units[:] = units
        self._take_units(new)

    def take_hyperparameters(self) -> None:
        """Copy what the script has set in the groups to the inner optimizer."""
        self._inner.take()

    def show_hyperparameters(self) -> None:
        """Copy what a load has set in the inner optimizer's groups to the script's groups."""
        self._inner.give()
        self.state_changed()

    def state_changed(self) -> None:
        """Take note that the state has been replaced, or a part of it, on this rank at least."""
        self._state_changed = True

    def agree_on_state(self) -> None:
        """Forget, between two steps, what belongs to a state that was replaced on some rank. Collective."""
        changed = torch.tensor([float(self._state_changed)], dtype=torch.float64)
        self._forget_replaced(float(self._comm.all_reduce_scalars(to_device(changed, self._comm.device))))

    def _forget_replaced(self, ranks: float) -> None:
        """Forget what belongs to a state that was replaced on so many ranks."""
        if ranks and self.stepper is not None:
            self.stepper.forget()
        self._state_changed = False

    def _choose_fused(self) -> bool:
        """Use torch's one-pass kernels where the caller did not choose an implementation himself."""
        floats = all(torch.promote_types(unit.dtype, torch.float32) == torch.float32 for unit in self.units)
        if type(self.optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not floats:
            return False
        for group in self.optimizer.param_groups:
            chosen = group.get("fused") is not None or group.get("foreach") is not None
            if not chosen and not group.get("differentiable") and not group.get("capturable"):
                group["fused"] = True
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        self.optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        if not fused:
            self.optimizer.grad_scale = self.optimizer.found_inf = None  # type: ignore[attr-defined]
        return fused

    @property
    def slices(self) -> Sequence[ShardSlice]:
        """Return what the optimizer sees of this rank's shards; :meth:`wait` before their values are read."""
        return self._slices

    def split(self, label: Callable[[Unit, int], Label]) -> list[tuple[ShardSlice, Label]]:
        """Cut the slices so that the parameters of each have one label; return all of them with theirs."""
        labelled = split_slices(self._slices, label, self.optimizer)
        self._slices = [part for part, _ in labelled]
        return labelled

    def step(self, *, divisor: Scalar, clip: float, check_finite: bool, beside: Tensor) -> StepResult:
        """Average, unscale, clip and apply the gradients, unless they are not finite.

        ``divisor`` is what the summed gradients have to be divided by (``averaging.Averaging``); ``clip`` is
        the largest norm allowed, 0 for any; with ``check_finite`` a step with inf or NaN is skipped on every
        rank. ``beside`` (1-dim, float64, on the device) is summed over the ranks in the collective that the
        step needs anyway; the result has the sums. Afterwards every unit that stays unsharded is on its way
        to its new values.
        """
        self.wait()
        for unit in self.units:
            if not unit.shard_params:
                # unused since the last step, whose values may still be arriving
                unit.wait_unsharded()
                unit.writes.bring()
        mine = self._reducer.used()
        agreed, count = self._agree(mine, beside), beside.numel()
        by_device = self.decides_on_device and all(mine) and not (check_finite and has_hooks(self.outer))
        try:
            if by_device:
                return self._step_on_device(agreed, count, divisor, clip, check_finite)
            return self._step_by_host(agreed, count, float(divisor), clip, check_finite)
        finally:
            self._reducer.clear()

    def _step_by_host(
        self, agreed: Tensor, count: int, divisor: float, clip: float, check_finite: bool
    ) -> StepResult:
        facts, marks = self._apart(agreed)
        if self._comm.world_size > 1 and bool(self._comm.differs(marks)):
            self._comm.raise_order()
        self._comm.order.forget()
        numbers = facts.tolist()
        beside, (square, stop, changed, *counts) = numbers[:count], numbers[count:]
        norm = math.sqrt(square) / divisor if square >= 0 else math.nan
        skipped = check_finite and not math.isfinite(norm)
        if not skipped:
            coefficient = 1.0
            if clip > 0 and norm > clip:
                coefficient = clip / (norm + 1e-6)
            self._comm.drain()
            self._forget_replaced(changed)
            # a norm of infinity clips everything finite to nothing and leaves NaN, as torch's clipping does
            self._apply([ranks > 0 for ranks in counts], divisor / coefficient if coefficient else math.inf)
        return StepResult(norm, skipped, stop, beside=beside)

    def _step_on_device(
        self, agreed: Tensor, count: int, divisor: Scalar, clip: float, check_finite: bool
    ) -> StepResult:
        """Step without a number that the host has to see: every parameter has a gradient.

        Where the ranks have used the model in different orders, nothing is changed, and the result says so.
        """
        facts, marks = self._apart(agreed)
        beside, facts = facts[:count], facts[count:]
        norm, multiplier, found_inf = prepare_step(facts[0], divisor=divisor, clip=clip)
        differs = self._comm.differs(marks).to(found_inf.dtype)
        skip = torch.maximum(found_inf, differs) if check_finite else differs
        self._comm.drain()
        guarded = check_finite or self._comm.world_size > 1
        self._apply([True] * (facts.numel() - 3), 1.0 / multiplier, skip if guarded else None)
        return StepResult(norm, skip, facts[1], differs, beside=beside)

    def _apart(self, agreed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of what is beside the step and of its facts, and those of the marks behind them."""
        batches = sum(each.mark_count for each in self._comm.batches)
        at = agreed.numel() - len(self._comm.order.marks()) - batches
        return agreed[:at], agreed[at:]

    def check(self) -> None:
        """Raise what ended a step half-way: the values are of two steps then, and nothing may go on."""
        if self.stepper is not None:
            self.stepper.check()

    def finish(self) -> None:
        """Raise what ended the last step early, if it has not been raised yet: no other step will follow."""
        if self.stepper is not None:
            self.stepper.finish()

    def wait(self) -> None:
        """Wait until the last step has ended everywhere. Raises what ended it early, such as a DiskError."""
        if self.stepper is not None:
            self.stepper.wait()

    def _agree(self, used: list[bool], beside: Tensor) -> Tensor:
        """Return the sums of ``beside``, the sum of squares of all gradients, how many ranks want to stop, on
        how many the state has been replaced, for each parameter how many had a gradient, and the marks of the
        order of collectives and of batches: one all-reduce, float64 on the device.
        """
        device = self._comm.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        own = self.stepper.own_squares() if self.stepper is not None else []
        if own:
            total = torch.stack(own).sum()
        for copies in {} if own else {unit.copies: None for unit in self.units}:
            if squares := self._squares(copies):
                total = total + torch.stack(squares).sum() / copies
        own_news = map(float, (preemption.requested(), self._state_changed, *used))
        flags = [*own_news, *self._comm.order.marks()]
        mine = to_device(torch.tensor(flags, dtype=torch.float64), device)
        facts = torch.cat([beside, total.reshape(1), mine, *self._comm.batch_marks()])
        return self._comm.all_reduce_scalars(facts)

    def _squares(self, copies: int) -> list[Tensor]:
        """Sum the squares of every cut of units that so many ranks keep, in the units' order."""
        units = [unit for unit in self.units if unit.copies == copies]
        stores = [unit.store for unit in units if unit.store is not None and unit.store.has_grad]
        here = [store for store in stores if isinstance(store, DeviceStore)]
        found = iter(squares_of([part for store in here for part in store.grad_parts()]))
        squares: list[Tensor] = []
        for store in stores:
            squares += (
                islice(found, len(store.cuts)) if isinstance(store, DeviceStore) else store.grad_squares()
            )
        return all_on(squares, self._comm.device)

    def _apply(self, used: list[bool], divisor: Scalar, found_inf: Tensor | None = None) -> None:
        run_hooks(self.outer, before=True)
        self._inner.take()
        self._rule.begin(divisor, found_inf)
        self._slices = separate_unused(self._slices, self.units, used, self.optimizer)
        with named("step"):
            all_may_differ = self._rule.apply(self._updates_here(), self.optimizer.state, live=True)
        if self.stepper is not None:
            self.stepper.start(self._rule, self._slices, used)
        else:
            self._rule.end()
        self.outer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        stay = [u for u in self.units if not u.shard_params and not (self.stepper and self.stepper.brings(u))]
        with torch.no_grad():
            for unit in self.units:
                if isinstance(unit.store, DeviceStore) and (all_may_differ or unit.store.narrow_copy is None):
                    unit.values.write(0, unit.store.master)
        for unit in stay:
            unit.refresh()
        if self._comm.drain():
            for unit in stay:
                unit.wait_unsharded()
        for unit in self.units:
            unit.stepped()
        self._inner.give()
        run_hooks(self.outer, before=False)

    def _updates_here(self) -> list[SliceUpdate]:
        """Describe the updates of what is on the device."""
        updates = []
        for part in self._slices:
            store = part.unit.store
            if self.stepper is not None and self.stepper.takes(part.unit):
                continue
            if isinstance(store, DeviceStore) and part.leaf is not None and part.used and store.has_grad:
                out = None if store.narrow_copy is None else part.of(store.narrow_copy)
                updates.append(SliceUpdate(part.group, part.leaf, part.of(store.grad()), out, part.place))
        return updates
