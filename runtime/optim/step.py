"""Steps the flat shards of all units, and brings the new values to where gathers read.

That is ``ValueStore.write`` for each unit, and ``Unit.refresh`` for one that stays unsharded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...cuda_ops.arguments import Scalar
from ...cuda_ops.norm import prepare_step
from ...cuda_ops.step import SliceUpdate
from .. import preemption
from ..comm.collectives import Comm
from ..comm.shard_spec import full_shape
from ..device import all_on, named, to_device
from ..errors import OptimizerError
from ..precision import StepResult
from ..zero.reduce import GradientConsumer, GradientReducer
from ..zero.store import Access, open_tiles, squares_of
from ..zero.unit import Unit
from .slices import Label, ShardSlice, make_slices, separate_unused, split_slices
from .update_rule import State, UpdateRule

# -- inner optimizer --------------------------------------------------------------------------------
#
# Builds the optimizer that steps the shards from the one that the script holds.


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether hooks want to be called around steps, and so not around those that are skipped."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def run_hooks(optimizer: torch.optim.Optimizer, *, before: bool) -> None:
    """Call the step hooks that were registered on the optimizer, and those for all optimizers."""
    if before:
        for hook in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
            if hook(optimizer, (optimizer,), {}) is not None:
                raise OptimizerError("a step pre-hook cannot change the arguments of engine.step()")
    else:
        for after in chain(
            optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()
        ):
            after(optimizer, (optimizer,), {})


class InnerOptimizer:
    """Builds an optimizer of the original class for this rank's shards, and copies its groups' values from
    and to the script's.
    """

    def __init__(self, outer: torch.optim.Optimizer) -> None:
        self.outer = outer
        # Not by its constructor, which may have any arguments, and would make state of groups without
        # parameters.
        optimizer: Any = object.__new__(type(outer))
        optimizer.__dict__.update(outer.__dict__)
        for name in ("step", "zero_grad"):
            # a scheduler's wrapper, bound to the script's optimizer
            optimizer.__dict__.pop(name, None)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            optimizer.__dict__[name] = {}  # the engine calls them once a step
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = []
        self.optimizer: torch.optim.Optimizer = optimizer
        self.add_groups(outer.param_groups)
        self._taken: list[dict[str, Any]] = []

    def add_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Add groups with the options of these, as yet without a shard."""
        for group in groups:
            own = {key: value for key, value in group.items() if key != "param_names"}
            self.optimizer.param_groups.append({**own, "params": []})

    def take(self) -> None:
        """Copy the hyper-parameters that the script sees to the inner optimizer."""
        groups = self.optimizer.param_groups
        for group, own in zip(self.outer.param_groups, groups, strict=True):
            own.update(_entries(group))
        self._taken = [_entries(group) for group in groups]

    def give(self) -> None:
        """Copy what a step has changed in the groups (counters, an estimated rate) to the script's groups."""
        for group, own, before in zip(
            self.outer.param_groups, self.optimizer.param_groups, self._taken, strict=False
        ):
            for key, value in _entries(own).items():
                # By identity: an entry may be a tensor, and the script may have set the same number again,
                # which an inner value from before the step must not replace.
                if key in group and value is not before.get(key):
                    group[key] = value


_OWN_CHOICE = ("params", "param_names", "fused", "foreach")
"""Lists the entries that the inner optimizer keeps for itself."""


def _entries(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN_CHOICE}


# -- initial state ----------------------------------------------------------------------------------
#
# Moves state that an optimizer makes when it is constructed (Adagrad) to the shards, which come later.


Known = dict[str, Tensor | float]
"""Maps a state entry's name to its tensor, or to the one value of each of its parameter's elements."""
Entries = dict[str, Tensor | float | None]
"""Maps it to None where no parameter of the group has an element on this rank that would show the value."""


def take_initial_state(optimizer: torch.optim.Optimizer) -> list[Entries]:
    """Return the entries that each group's parameters begin with; clear the optimizer's state.

    A parameter shows what an entry is by its shape. One without elements (another pipeline stage's, an empty
    placeholder) shows no value, and one without dimensions does not tell an entry for each element from one
    for the whole parameter: others go first.

    Raises ValueError if the optimizer has already made steps, or begins with values that are not all alike.
    """
    groups: list[Entries] = []
    for group in optimizer.param_groups:
        entries: Entries = {}
        for parameter in sorted(group["params"], key=_shows_little):
            # an optimizer that was made before a parameter was cut has a tensor of the whole
            shapes = {tuple(parameter.shape), full_shape(parameter, parameter.shape)}
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or (key == "step" and value.any()):
                    raise _used(optimizer)
                if key == "step" or tuple(value.shape) not in shapes:
                    entries.setdefault(key, value)
                elif not value.numel():
                    entries.setdefault(key, None)
                else:
                    alike = float(value.reshape(-1)[0])
                    if not bool((value == alike).all()):
                        raise _used(optimizer)
                    entries.setdefault(key, alike)
        groups.append(entries)
    optimizer.state.clear()
    return groups


def _shows_little(parameter: Tensor) -> int:
    return 2 if not parameter.numel() else int(parameter.dim() == 0)


def _used(optimizer: torch.optim.Optimizer) -> ValueError:
    return ValueError(
        f"optimizer {type(optimizer).__name__} already has state: pass a new one to zlaunch.initialize. "
        "To import the state, save it with torch.distributed.checkpoint and run `zlaunch checkpoint import`"
    )


def give_initial_state(
    optimizer: torch.optim.Optimizer, groups: list[Entries], slices: Sequence[ShardSlice]
) -> None:
    """Copy the initial state of their parameters to the shards. Raises DiskError, ValueError for a value that
    cannot be found out.
    """
    known = {index: _completed(optimizer, index, groups[index]) for index in {part.group for part in slices}}
    for part in slices:
        entries = known[part.group]
        if not entries:
            continue
        if part.leaf is None:
            _fill_on_disk(part, entries)
            continue
        state: dict[str, Any] = {}
        for key, value in entries.items():
            copy = value.clone() if isinstance(value, Tensor) else torch.full_like(part.leaf, value)
            state[key] = copy.requires_grad_(False)
        optimizer.state[part.leaf] = state


def _completed(optimizer: torch.optim.Optimizer, index: int, entries: Entries) -> Known:
    """Find out values that no parameter has shown: as an optimizer of the class begins over one element."""
    known = {key: value for key, value in entries.items() if value is not None}
    unknown = [key for key in entries if key not in known]
    if not unknown:
        return known
    group = optimizer.param_groups[index]
    probe = torch.zeros(1)
    try:
        made = type(optimizer)([{**group, "params": [probe]}], **optimizer.defaults)
        return known | {key: float(made.state[probe][key]) for key in unknown}
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} has an unknown initial value for {', '.join(unknown)}: "
            f"no parameter of group {index} has elements on this rank, and building another optimizer of "
            f"its class failed ({type(error).__name__}: {error}). Keep all constructor arguments in its "
            "`defaults`"
        ) from error


def _fill_on_disk(part: ShardSlice, entries: Known) -> None:
    part.scalars = {key: value.clone() for key, value in entries.items() if isinstance(value, Tensor)}
    part.on_disk = sorted(entries.keys() - part.scalars.keys())
    store = part.unit.store
    assert store is not None
    if any(entries[key] for key in part.on_disk):  # a new file has zeros
        own = next(tile for tile in store.tiles if tile[0] <= part.start and part.stop <= tile[1])
        with open_tiles([(store, own, None)], Access.WRITE) as tiles:
            for _, _, view in tiles:
                for key, region in zip(part.on_disk, view.state, strict=False):
                    region[part.span(view)].fill_(float(entries[key]))


# -- step method -----------------------------------------------------------------------------------
#
# Says what a way to step units has to do, and what the engine asks of it.


class StepMethod(GradientConsumer):
    """Steps the units that :class:`ShardedOptimizer` does not step itself; this class takes none of them.

    Subclasses step units off the device, units whose optimizer needs whole parameters, and units inside the
    backward pass. The engine calls the methods of the last section before it does what their names say, so
    that a method can refuse it, or bring the ranks together first.
    """

    steps_on_device = True
    """Tells whether every unit is stepped on the device, all at once."""
    by_parameter = False
    """Tells whether it wants slices of one parameter each."""

    # -- a step

    def takes(self, unit: Unit) -> bool:
        """Tell whether it steps ``unit``."""
        return False

    def forget(self) -> None:
        """Forget what belongs to a state that has been replaced. All ranks do, in the same step."""

    def own_squares(self) -> list[Tensor]:
        """Return sums of squares that make the norm in place of the stores' gradients, if any do."""
        return []

    def start(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Do the step, or begin it. Raises DiskError if it was done at once.

        ``used``: for each parameter of each unit, in order, whether some rank had a gradient for it; equal on
        all ranks, unlike ``slices``.
        """
        rule.end()

    def handles_refresh(self, unit: Unit) -> bool:
        """Return whether this method refreshes ``unit`` itself, so that the caller does not."""
        return False

    def check(self) -> None:
        """Raise what ended a step early."""

    def finish(self) -> None:
        """Raise what ended the last step early, if it has not been raised yet: no other step will follow."""

    def wait(self) -> None:
        """Wait until the step has ended, uploads included. Raises what ended it early."""

    # -- diverged replicas

    @property
    def replicas_diverged(self) -> bool:
        """Return whether replicas of a weight differ between ranks, as in 0/1 Adam's local steps."""
        return False

    def sync_replicas(
        self,
        groups: Sequence[dict[str, Any]],
        slices: Sequence[ShardSlice],
        state: State,
        *,
        keeps_writes: bool,
    ) -> None:
        """Give all ranks the same weights and moments after they diverged. Collective, between two steps.
        Raises OptimizerError where ``keeps_writes`` and the script has changed a rank's own values.
        """

    # -- the engine's calls

    def connect(
        self,
        optimizer: ShardedOptimizer,
        divisor: WeakMethod[Callable[[], float | Tensor]],
        norm: WeakMethod[Callable[[], float | None]],
    ) -> None:
        """Take what it needs of its engine: the optimizer, the divisor of summed gradients, and the norm of
        the last step's gradient. Called once.
        """

    def check_accumulation(self, steps: object) -> None:
        """Raise OptimizerError if a step cannot have so many micro-batches."""

    def before_forward(self) -> None:
        """Raise OptimizerError if the model's values are of two steps."""

    def before_backward(self, *, retain_graph: bool) -> None:
        """Raise OptimizerError if the backward pass would change what the graph still needs."""

    def before_step(self) -> None:
        """Raise OptimizerError if the last backward pass has ended half-way."""

    def before_save(self) -> None:
        """Raise OptimizerError if the model's values are of two steps."""

    def begin_load(self) -> None:
        """Allow values of two steps, which a checkpoint is about to replace."""

    def end_load(self, *, has_loaded: bool) -> None:
        """Take note of the end of a load, also of one that raised."""

    def counters(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it beside the engine's counters."""
        return {}

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Take a checkpoint's :meth:`counters`, which another method may have saved."""


# -- sharded optimizer ------------------------------------------------------------------------------


DivisorOf = Callable[[Sequence[float] | Tensor], Scalar]
"""Returns what summed gradients have to be divided by, for the sums of a step's extra statistics."""


class ShardedOptimizer:
    """Steps this rank's shards by the rule of a torch optimizer over the model's parameters.

    That optimizer stays the caller's (schedulers keep working, ``param_groups`` stay live); an inner one of
    its class, :attr:`optimizer`, has the shards in its groups.

    Note [Gathers beside the step]. Nothing computes before the first blocks of a forward pass that their
    gathers could run beside, except the step: its kernels are still running on the GPU when the host calls
    the model. So the units that a pass uses first are stepped first, and the stream is marked behind them
    (``Unit.prepare_gather``). Their gathers begin at these marks instead of behind the whole step. They are
    still started by the forward pass: what the script changes in between is sent, because a write to the
    values forgets the mark, and all ranks start the same collectives in the same order. Their memory is
    allocated here and kept until then.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        reducer: GradientReducer,
        comm: Comm,
        *,
        whole: bool = False,
        make_method: Callable[[Sequence[Unit]], StepMethod] | None = None,
        on_device: bool = False,
        used_first: Callable[[], Sequence[Unit]] = tuple,
    ) -> None:
        """Prepare to step ``units``. ``whole``: the optimizer gets whole tensors, which this rank must have.
        ``make_method`` is given the units, which may be replaced later, if not all are stepped at once.
        ``on_device``: decisions are made there where that is possible, so that the host never waits for it.
        ``used_first`` returns the units that the next forward pass uses first.
        """
        self._initial = take_initial_state(optimizer)
        self._inner = InnerOptimizer(optimizer)
        self.optimizer = self._inner.optimizer
        self.units = list(units)
        self._reducer = reducer
        self._comm = comm
        self._whole = whole
        self._slices: list[ShardSlice] = []
        self.method = StepMethod() if make_method is None else make_method(self.units)
        # The reducer passes each unit's gradient to the step method, which is a GradientConsumer.
        reducer.consumer = self.method
        self._on_device = on_device
        self._used_first = used_first
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
        if self.method.by_parameter:
            self.split(lambda unit, index: (id(unit), index))
        give_initial_state(self.optimizer, self._initial, made)
        self.decides_on_device = self._choose_fused() and self._on_device and self.method.steps_on_device

    def set_units(self, units: Sequence[Unit]) -> None:
        """Replace the units that are stepped: those that stay keep their state, new ones begin without. Those
        that are gone had no state. Further param groups are taken from the outer optimizer.
        """
        self.wait()  # a step in the background works on the units and slices of now
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

    def sync_replicas(self, *, keeps_writes: bool) -> None:
        """Give all ranks the same weights and moments, if they have diverged. Collective, between two steps.
        Raises OptimizerError where ``keeps_writes`` and the script has changed a rank's own values.
        """
        self.agree_on_state()
        self.take_hyperparameters()
        groups = self.optimizer.param_groups
        self.method.sync_replicas(groups, self.slices, self.optimizer.state, keeps_writes=keeps_writes)

    def _forget_replaced(self, ranks: float) -> None:
        """Forget what belongs to a state that was replaced on so many ranks."""
        if ranks:
            self.method.forget()
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

    def step(
        self,
        *,
        divisor: DivisorOf,
        clip: float,
        check_finite: bool,
        extra_stats: Tensor,
    ) -> StepResult:
        """Average, unscale, clip and apply the gradients, unless they are not finite.

        ``extra_stats``: extra values (1-dim, float64, on the device) to sum over the ranks in the same
        all-reduce as the norm; the result has the sums. ``divisor`` takes the sums and returns what the
        summed gradients have to be divided by (``averaging.Averaging``). ``clip`` is the largest norm
        allowed, 0 for any; with ``check_finite`` a step with inf or NaN is skipped on every rank. Afterwards
        the refresh of every unit that stays unsharded has started.
        """
        self.wait()
        for unit in self.units:
            if not unit.shard_params:
                # unused since the last step, whose values may still be arriving
                unit.wait_unsharded()
                unit.writes.sync_to_masters()
        mine = self._reducer.used()
        # One all-reduce tells the ranks all that they have to agree on: a second one would double the
        # latency that every step pays.
        agreed = self._all_reduce_step_stats(mine, extra_stats)
        count = extra_stats.numel()
        # A parameter that this rank has a gradient of is used by definition, so with all of them the host
        # needs no other rank's counts. Hooks run around steps that are made, and the host has to know first.
        by_device = self.decides_on_device and all(mine) and not (check_finite and has_hooks(self.outer))
        try:
            if by_device:
                return self._step_on_device(agreed, count, divisor, clip, check_finite)
            return self._step_by_host(agreed, count, divisor, clip, check_finite)
        finally:
            self._reducer.clear()

    def _step_by_host(
        self, agreed: Tensor, count: int, divisor_of: DivisorOf, clip: float, check_finite: bool
    ) -> StepResult:
        facts, marks = self._split_stats(agreed)
        # Check this first: if the ranks ran the units in different orders, their sums mix gradients of
        # different units.
        if self._comm.world_size > 1 and bool(self._comm.differs(marks)):
            self._comm.raise_order()
        self._comm.order.forget()
        numbers = facts.tolist()
        extra_stats = numbers[:count]
        (square, stop, changed, *counts) = numbers[count:]
        divisor = float(divisor_of(extra_stats))
        norm = math.sqrt(square) / divisor if square >= 0 else math.nan  # NaN is not >= 0
        skipped = check_finite and not math.isfinite(norm)
        if not skipped:
            coefficient = 1.0
            if clip > 0 and norm > clip:
                coefficient = clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
            # Other ranks read these values where they are, in shared memory, until their gathers have ended.
            self._comm.drain()
            self._forget_replaced(changed)
            # a norm of infinity clips everything finite to nothing and leaves NaN, as torch's clipping does
            self._apply([ranks > 0 for ranks in counts], divisor / coefficient if coefficient else math.inf)
        return StepResult(norm, skipped, stop, extra_stats=extra_stats)

    def _step_on_device(
        self, agreed: Tensor, count: int, divisor_of: DivisorOf, clip: float, check_finite: bool
    ) -> StepResult:
        """Step without a number that the host has to see: every parameter has a gradient.

        Where the ranks have used the model in different orders, nothing is changed, and the result says so.
        """
        facts, marks = self._split_stats(agreed)
        extra_stats = facts[:count]
        facts = facts[count:]
        norm, multiplier, found_inf = prepare_step(facts[0], divisor=divisor_of(extra_stats), clip=clip)
        differs = self._comm.differs(marks).to(found_inf.dtype)
        skip = torch.maximum(found_inf, differs) if check_finite else differs
        self._comm.drain()
        # One rank without a check never skips; its kernels then keep their step counts on the host.
        guarded = check_finite or self._comm.world_size > 1
        self._apply([True] * (facts.numel() - 3), 1.0 / multiplier, skip if guarded else None)
        return StepResult(norm, skip, facts[1], differs, extra_stats=extra_stats)

    def _split_stats(self, agreed: Tensor) -> tuple[Tensor, Tensor]:
        """Split the reduced vector into statistics and the marks of orders and batches behind them."""
        batches = sum(each.mark_count for each in self._comm.batches)
        at = agreed.numel() - len(self._comm.order.marks()) - batches
        return agreed[:at], agreed[at:]

    def check(self) -> None:
        """Raise what ended a step half-way: the values are of two steps then, and nothing may go on."""
        self.method.check()

    def finish(self) -> None:
        """Raise what ended the last step early, if it has not been raised yet: no other step will follow."""
        self.method.finish()

    def wait(self) -> None:
        """Wait until the last step has ended everywhere. Raises what ended it early, such as a DiskError."""
        self.method.wait()

    def _all_reduce_step_stats(self, used: list[bool], extra_stats: Tensor) -> Tensor:
        """All-reduce the step's statistics once (float64, on the device).

        They are, in this order: extra statistics, squared gradient norm, number of ranks that want to stop,
        number of ranks whose state was replaced, number of ranks with a gradient for each parameter, and
        hashes of the order of collectives and of the batches.
        """
        device = self._comm.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        own = self.method.own_squares()
        if own:
            total = torch.stack(own).sum()
        # Each rank that keeps a copy of a shard adds its squares, so each adds its share of them.
        for copies in {} if own else {unit.copies: None for unit in self.units}:
            if squares := self._squares(copies):
                total = total + torch.stack(squares).sum() / copies
        own_news = map(float, (preemption.requested(), self._state_changed, *used))
        flags = [*own_news, *self._comm.order.marks()]
        mine = to_device(torch.tensor(flags, dtype=torch.float64), device)
        facts = torch.cat([extra_stats, total.reshape(1), mine, *self._comm.batch_marks()])
        return self._comm.all_reduce_scalars(facts)

    def _squares(self, copies: int) -> list[Tensor]:
        """Sum the squares of every cut of units that so many ranks keep, in the units' order."""
        units = [unit for unit in self.units if unit.copies == copies]
        stores = [unit.store for unit in units if unit.store is not None and unit.store.has_grad]
        here = [store for store in stores if store.on_device]
        found = iter(squares_of([part for store in here for part in store.grad_parts()]))
        squares: list[Tensor] = []
        for store in stores:
            squares += islice(found, len(store.cuts)) if store.on_device else store.grad_squares()
        return all_on(squares, self._comm.device)

    def _apply(self, used: list[bool], divisor: Scalar, found_inf: Tensor | None = None) -> None:
        run_hooks(self.outer, before=True)
        self._inner.take()
        self._rule.begin(divisor, found_inf)
        # torch's optimizers pass over a parameter without a gradient, and one slice may cover several.
        self._slices = separate_unused(self._slices, self.units, used, self.optimizer)
        # See Note [Gathers beside the step].
        first = list(self._used_first()) if self.decides_on_device else []
        with named("step"):
            soon, rest = self._updates_here(first)
            may_differ = self._rule.apply(soon, self.optimizer.state, live=True)
            self._publish(first, may_differ)
            marks = [unit.prepare_gather() for unit in first]
            may_differ = self._rule.apply(rest, self.optimizer.state, live=True)
        self.method.start(self._rule, self._slices, used)
        self.outer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        stay = [u for u in self.units if not u.shard_params and not self.method.handles_refresh(u)]
        chosen = set(map(id, first))
        self._publish([unit for unit in self.units if id(unit) not in chosen], may_differ)
        for unit, mark in zip(first, marks, strict=True):
            unit.values.settled = mark
        for unit in stay:
            unit.refresh()
        if self._comm.drain():
            for unit in stay:
                unit.wait_unsharded()
        for unit in self.units:
            unit.stepped()
        self._inner.give()
        run_hooks(self.outer, before=False)

    @torch.no_grad()
    def _publish(self, units: Sequence[Unit], all_may_differ: bool) -> None:
        for unit in units:
            if unit.store is not None:
                unit.store.publish(copy_is_new=not all_may_differ)

    def _updates_here(self, first: Sequence[Unit]) -> tuple[list[SliceUpdate], list[SliceUpdate]]:
        """Describe the updates of what is on the device: of the units ``first``, and of the others."""
        chosen = set(map(id, first))
        soon: list[SliceUpdate] = []
        rest: list[SliceUpdate] = []
        for part in self._slices:
            store = part.unit.store
            if store is None or not store.on_device or self.method.takes(part.unit):
                continue
            if part.leaf is not None and part.used and store.has_grad:
                out = None if store.compute_copy is None else part.of(store.compute_copy)
                update = SliceUpdate(part.group, part.leaf, part.of(store.grad()), out, part.place)
                (soon if id(part.unit) in chosen else rest).append(update)
        return soon, rest
