"""Checks the script's model and optimizer at each step, and follows their changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ...cuda_ops.narrow_state import put, widen_all
from ...cuda_ops.step import is_narrow_step
from ..comm.collectives import Comm
from ..config import Config
from ..errors import OptimizerError, ParameterError
from ..optim.one_bit import agree_on_phase
from ..optim.registry import check_narrow, keeps_whole_gradients
from ..optim.slices import groups_by_parameter
from ..optim.step import ShardedOptimizer
from ..optim.update_rule import PARAMETER_STATE, is_elementwise
from ..zero import placeholder
from ..zero.hooks import ShardedModel
from ..zero.placeholder import STATES
from ..zero.policy import UnitFactory
from ..zero.reduce import GradientReducer
from ..zero.unit import Unit
from .accept import untrainable
from .optimizer import MARK, check_mark, unguard

# -- integrity --------------------------------------------------------------------------------------
#
# Checks at each step that the model still is what the engine was made from.


Table = dict[str, Any]


class Integrity:
    """Records each module's parameters and children, and each unit's parameters, and compares them later.

    Children without parameters and buffers (activation functions, dropout) may come and go. The comparisons
    are of identities and addresses, a fraction of a microsecond for each parameter.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self._module = module
        self._units = units
        self._frozen = [p for unit in units if not unit.trainable for p in unit.parameters]
        self._outside = [(n, p) for n, p in module.named_parameters() if placeholder.owner(p) is None]
        self._record()

    def _record(self) -> None:
        self._tables: list[tuple[nn.Module, Table, tuple[Any, ...]]] = []
        self._empty: list[Table] = []
        self._owners: list[nn.Module] = []
        """Holds the module of each table in ``_empty``."""
        for each in self._module.modules():
            for table in (each._parameters, each._modules):
                if table:
                    self._tables.append((each, table, tuple(table.values())))
                else:
                    self._empty.append(table)
                    self._owners.append(each)

    def unfrozen(self) -> list[nn.Parameter]:
        """Return parameters that were frozen and require a gradient now. Raises ParameterError for those that
        no engine can train.
        """
        for name, parameter in self._outside:
            if (reason := untrainable(parameter)) is not None:
                raise ParameterError(f"parameter {name} {reason}")
        return [parameter for parameter in self._frozen if parameter.requires_grad]

    def check(self) -> None:
        """Raise ParameterError, naming the parameter and the remedy, if anything has been replaced."""
        changed = [
            (module, table, expected)
            for module, table, expected in self._tables
            if len(table) != len(expected) or not all(map(is_, table.values(), expected))
        ]
        if any(map(len, self._empty)):
            changed += [(*pair, ()) for pair in zip(self._owners, self._empty, strict=True) if pair[1]]
        for module, table, expected in changed:
            kept = filter(_matters, expected)
            here = filter(_matters, table.values())
            if [id(each) for each in kept] != [id(each) for each in here]:
                raise ParameterError(self._explain(module, table, expected))
        if changed:
            self._record()
        with torch._C.DisableTorchFunctionSubclass():
            self._check_places()

    def _check_places(self) -> None:
        for unit in self._units:
            for index in range(len(unit.parameters)):
                if not unit.is_in_place(index):
                    raise ParameterError(
                        f"{unit.names[index]} is no longer in the engine's memory (its data was replaced or "
                        "swapped). Write in place: `with torch.no_grad(): parameter.copy_(values)`, at "
                        "stage 3 inside zlaunch.zero.GatheredParameters([parameter], modifier_rank=0)"
                    )

    def _explain(self, module: nn.Module, table: Table, expected: tuple[Any, ...]) -> str:
        prefix = next((name for name, each in self._module.named_modules() if each is module), "")
        known = {id(value) for value in expected}
        names = [name for name, value in table.items() if id(value) not in known and _matters(value)]
        what = f"{prefix}.{names[0]}" if prefix and names else (names[0] if names else prefix or "the model")
        done = "was replaced or added" if names else "lost parameters or modules"
        return (
            f"{what} {done} after zlaunch.initialize, so the engine does not train it: change the model "
            "before initialize, or call engine.destroy() and initialize again"
        )


def _matters(entry: Any) -> bool:
    """Tell whether the engine has to do with a parameter or child: not with a module that has neither
    parameters nor buffers, unless the runtime has replaced a forward in it.
    """
    if not isinstance(entry, nn.Module):
        return entry is not None
    has_tensors = next(entry.parameters(), None) is not None or next(entry.buffers(), None) is not None
    return has_tensors or any("forward" in vars(each) for each in entry.modules())


class GroupIntegrity:
    """Records the parameters in an optimizer's groups, and compares them later."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._expected = [tuple(group["params"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Raise ParameterError if parameters were added or removed by hand."""
        groups = self._optimizer.param_groups
        for index, expected in enumerate(self._expected):
            here = groups[index]["params"] if index < len(groups) else ()
            if len(here) != len(expected) or not all(map(is_, here, expected)):
                raise ParameterError(
                    f"param group {index} of the optimizer does not have the parameters that the engine "
                    "trains: add parameters with optimizer.add_param_group, and freeze them with "
                    "parameter.requires_grad_(False)"
                )
        if len(groups) != len(self._expected):
            raise ParameterError(
                "the optimizer has new param groups: use optimizer.add_param_group to train them"
            )


def check_unfrozen(parameters: Sequence[nn.Parameter], groups: dict[int, int]) -> None:
    """Raise ParameterError for parameters that require a gradient, but that no optimizer group has."""
    for parameter in parameters:
        if id(parameter) not in groups:
            raise ParameterError(
                f"{placeholder.name_of(parameter)} was frozen at zlaunch.initialize and now requires "
                "a gradient, but the optimizer does not have it: call "
                "optimizer.add_param_group({'params': [...]})"
            )


# -- overflow ---------------------------------------------------------------------------------------
#
# Names the parameters whose gradients overflow.


def nonfinite_names(units: Sequence[Unit]) -> list[str]:
    """Return the names of parameters with inf or NaN in this rank's shard of the gradients."""
    names: list[str] = []
    for unit in units:
        store = unit.store
        if store is None or not store.has_grad:
            continue
        if store.on_device:
            for index, first, last in unit.layout.overlaps(unit.start, unit.stop):
                if not bool(torch.isfinite(store.grad()[first - unit.start : last - unit.start]).all()):
                    names.append(unit.names[index])
            continue
        # names are as precise as the squares, which are known per cut
        for (low, high), square in zip(store.cuts, store.grad_squares(), strict=False):
            if not square.isfinite():
                slots = unit.layout.overlaps(unit.start + low, unit.start + high)
                names += [unit.names[index] for index, _, _ in slots]
    return names


# -- unused parameters ------------------------------------------------------------------------------
#
# Refuses a step in which a parameter has no gradient, for ``ignore_unused_parameters: false``.


_SHOWN = 10


def refuse_unused(units: Sequence[Unit], reducer: GradientReducer, comm: Comm) -> None:
    """Check that every parameter of the optimizer has a gradient of this step on every rank.

    Collective. Raises ParameterError on every rank, with the names of those that have none.
    """
    mine = [
        name
        for unit in units
        for index, (name, slot) in enumerate(zip(unit.names, unit.layout.slots, strict=True))
        if slot.group >= 0 and not reducer.has(unit, index)
    ]
    missing: dict[str, list[int]] = {}
    for rank, names in enumerate(comm.exchange(mine)):
        for name in names:
            missing.setdefault(name, []).append(rank)
    if not missing:
        return
    shown = [
        name if len(ranks) == comm.world_size else f"{name} (on rank {', '.join(map(str, ranks))})"
        for name, ranks in list(missing.items())[:_SHOWN]
    ]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise ParameterError(
        f"no gradient in this step for {', '.join(shown)}{more}: use them in the loss, freeze them "
        "(requires_grad_(False)), or set zero_optimization.ignore_unused_parameters to true"
    )


# -- whole state ------------------------------------------------------------------------------------
#
# Finds the optimizer's state of whole parameters, where one rank has all of it.


WholeState = dict[Tensor, dict[str, Any]]
"""Maps parameters of the model to their state, as ``optimizer.state`` of torch does."""


def whole_state(step: ShardedOptimizer) -> WholeState | None:
    """Return the optimizer's state by parameter. None if other ranks have parts of it (stage 1 and up), or if
    it is off the device, which may lack the memory: on all ranks alike.

    Tensors in the dtype of their parameter are views and take no further memory.
    """
    found: WholeState = {}
    for part in step.slices:
        unit = part.unit
        leaf = part.leaf
        is_whole = unit.stop - unit.start == unit.numel
        if not is_whole or leaf is None or unit.store is None or not unit.store.on_device:
            return None
        entries = widen_all(part.entries(step.optimizer.state))
        first = unit.start + part.start
        if entries:
            for index, low, high in unit.layout.overlaps(first, unit.start + part.stop):
                parameter = unit.parameters[index]
                shape = unit.shapes[index]
                own = found[parameter] = {}
                for key, value in entries.get(PARAMETER_STATE, {}).items():
                    own[key] = _in_dtype_of(parameter, key, value)
                for key, value in entries.items():
                    if key == PARAMETER_STATE:
                        continue
                    if is_elementwise(value, leaf):
                        value = value.reshape(-1)[low - first : high - first].view(shape)
                    elif isinstance(value, Tensor):
                        value = value.clone()  # torch counts each parameter's steps in place
                    own[key] = _in_dtype_of(parameter, key, value)
    return found


def _in_dtype_of(parameter: Tensor, key: str, value: Any) -> Any:
    """Return a state entry in the parameter's dtype, as torch's ``load_state_dict`` casts it."""
    if key != "step" and isinstance(value, Tensor) and torch.is_floating_point(value):
        return value.to(parameter.dtype)
    return value


# -- handles ----------------------------------------------------------------------------------------


class Handles:
    """Checks and applies what a script does to one engine's parameters and optimizer between its calls."""

    def __init__(
        self,
        sharded: ShardedModel,
        reducer: GradientReducer,
        step: ShardedOptimizer | None,
        units: UnitFactory,
        config: Config,
        dtype: torch.dtype | None,
    ) -> None:
        """Watch one engine's parameters; ``units`` builds units for those that are unfrozen. ``config`` and
        ``dtype``, what the model computes in, say which groups an optimizer may be given.
        """
        self._config = config
        self._dtype = dtype
        self._sharded = sharded
        self._reducer = reducer
        self._step = step
        self._factory = units
        self._integrity = Integrity(sharded.module, sharded.units)
        self._groups = GroupIntegrity(step.outer) if step is not None else None

    def take_unfrozen(self) -> None:
        """Start to train parameters that were frozen and now require a gradient. Collective, where there are
        any. Raises ParameterError for those that the optimizer does not have.
        """
        if self._step is None:
            return
        unfrozen = self._integrity.unfrozen()
        if unfrozen:
            self.check(but_unfrozen=True)
            check_unfrozen(unfrozen, groups_by_parameter(self._step.outer.param_groups))
            self._regroup()

    def check(self, *, but_unfrozen: bool = False) -> None:
        """Raise ParameterError if the model or the optimizer's groups are not what the engine trains.

        Parameters that have been unfrozen since the last forward pass are an error, too, unless
        ``but_unfrozen``: their gradients did not come here.
        """
        self._integrity.check()
        if self._groups is not None:
            self._groups.check()
        unfrozen = [] if but_unfrozen or self._step is None else self._integrity.unfrozen()
        if unfrozen:
            raise ParameterError(
                f"{placeholder.name_of(unfrozen[0])} was unfrozen after the forward pass, so the engine has "
                "no gradient for it: unfreeze it before the forward pass, and drop this gradient with "
                "zero_grad()"
            )

    def nonfinite_names(self) -> list[str]:
        """Return the names of parameters with inf or NaN in this rank's shard of the gradients."""
        return nonfinite_names(self._sharded.units)

    def refuse_unused(self) -> None:
        """Raise ParameterError if a parameter has no gradient of this step on some rank. Collective."""
        if self._step is not None:
            refuse_unused(self._step.units, self._reducer, self._sharded.comm)

    def sync_to_masters(self) -> None:
        """Copy values that the script has written into parameters back to the masters. Raises DiskError."""
        for unit in self._sharded.units:
            if not unit.shard_params:
                unit.wait_unsharded()
                unit.writes.sync_to_masters()

    def add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Train further parameters of the model, as ``optimizer.add_param_group`` asks. Collective."""
        members = group["params"]
        group = {**group, "params": [members] if isinstance(members, Tensor) else list(members)}
        mine = {id(p) for unit in self._sharded.units for p in unit.parameters}
        for entry in group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if id(parameter) not in mine:
                raise OptimizerError(
                    "add_param_group got a tensor that is not a parameter of this engine's model: add it "
                    "before zlaunch.initialize, or train it with a separate optimizer"
                )
            unit = placeholder.owner(parameter)
            if unit is not None and unit.trainable and unit.hides_gradient(parameter):
                raise OptimizerError(
                    f"{placeholder.name_of(parameter)} already has gradients of this step: call "
                    "add_param_group after engine.step(), or drop them with optimizer.zero_grad()"
                )
        self.check(but_unfrozen=True)
        optimizer._kind.add_param_group(optimizer, group)  # type: ignore[attr-defined]
        plain = object.__new__(optimizer._kind)  # type: ignore[attr-defined]  # of the class that was given
        plain.param_groups = optimizer.param_groups
        try:
            check_narrow(plain, self._config, self._dtype)
            if keeps_whole_gradients(plain):
                agree_on_phase(type(plain).__name__, plain.param_groups)
        except OptimizerError:
            optimizer.param_groups.pop()
            raise
        self._groups = GroupIntegrity(optimizer)
        self._regroup()

    def _regroup(self) -> None:
        """Build units with optimizer state for parameters that have been unfrozen."""
        step = self._step
        sharded = self._sharded
        assert step is not None
        self._check_on_device()
        step.wait()
        groups = groups_by_parameter(step.outer.param_groups)
        stale = [p for p in self._integrity.unfrozen() if placeholder.GRAD.__get__(p) is not None]
        if stale:
            raise ParameterError(
                f"{placeholder.name_of(stale[0])} has a gradient from before the engine trained it: call "
                "zero_grad() after unfreezing, or unfreeze before the forward pass"
            )
        sharded.comm.drain()
        for block in sharded.blocks:
            units = self._factory.rebuild(block, groups)
            if units is not None:
                sharded.replace_units(block, units)
        trained = [unit for unit in sharded.units if unit.trainable]
        self._reducer.set_units(trained)
        step.set_units(trained)
        self._integrity = Integrity(sharded.module, sharded.units)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state, as ``optimizer.state_dict()`` does."""
        step = self._needed_step()
        step.check()
        step.wait()
        step.take_hyperparameters()
        found = step.optimizer.state_dict()
        state = {index: widen_all(own) for index, own in found["state"].items()}
        return {**found, "state": state, MARK: self._shard_mark()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave on this rank."""
        step = self._needed_step()
        check_mark(state_dict, self._shard_mark())
        step.check()
        step.wait()
        step.take_hyperparameters()
        kinds = [group.get("state_dtype") or "fp32" for group in step.optimizer.param_groups]
        torch.optim.Optimizer.load_state_dict(
            step.optimizer, {key: value for key, value in state_dict.items() if key != MARK}
        )
        index = 0
        for group, kind in zip(step.optimizer.param_groups, kinds, strict=True):
            group["state_dtype"] = kind
            for leaf in group["params"]:
                if is_narrow_step(group, leaf.dtype):  # torch has cast its state to the leaf's dtype
                    own = step.optimizer.state[leaf]
                    for key, value in state_dict["state"].get(index, {}).items():
                        if is_elementwise(value, leaf):
                            put(own, key, value.to(leaf.device, copy=True), kind)
                index += 1
        step.show_hyperparameters()

    def release(self, *, has_stepped: bool) -> None:
        """Turn the script's optimizer back into a plain one, with its state if that is whole on this rank.

        ``has_stepped`` tells whether the engine has made a step: a rank without a shard cannot know by its
        state.
        """
        step = self._step
        if step is None:
            return
        has_state = has_stepped or any(part.entries(step.optimizer.state) for part in step.slices)
        unguard(step.outer, whole_state(step) if has_state else {})

    def _needed_step(self) -> ShardedOptimizer:
        assert self._step is not None
        self._check_on_device()
        if any(part.leaf is None for part in self._step.slices):
            raise OptimizerError(
                "the optimizer's state is on NVMe: use engine.save_checkpoint and load_checkpoint"
            )
        return self._step

    def _check_on_device(self) -> None:
        """Raise OffloadedError if ``offload_states`` has moved a state to host memory."""
        for unit in self._sharded.units:
            unit.check_on_device(*STATES)

    def _shard_mark(self) -> dict[str, Any]:
        assert self._step is not None
        options = self._sharded.options
        comm = self._sharded.comm
        return {
            "rank": comm.rank,
            "world_size": comm.world_size,
            "stage": options.shard_optimizer + options.shard_grads + options.shard_params,
            "shards": [[part.start, part.stop, part.group] for part in self._step.slices],
        }
