"""Checks the script's model and optimizer at each step, and follows their changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.narrow_state import put, widen_all
from ...cuda_ops.step_rules import is_narrow_step
from ..config import Config
from ..errors import OptimizerError, ParameterError
from ..one_bit.optimizers import agree_on_phase
from ..optim.param_groups import groups_by_parameter
from ..optim.sharded_optimizer import ShardedOptimizer
from ..optim.update_rule import is_elementwise
from ..step_choice import keeps_whole_gradients
from ..zero import placeholder
from ..zero.hooks import ShardedModel
from ..zero.ownership import STATES
from ..zero.reduce import GradientReducer
from ..zero.unit_policy import UnitFactory
from .accepted_optimizers import check_narrow
from .integrity import GroupIntegrity, Integrity, check_unfrozen
from .optimizer import MARK, check_mark, unguard
from .overflow import nonfinite_names
from .unused_parameters import refuse_unused
from .whole_state import whole_state


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
        self._config, self._dtype = config, dtype
        self._sharded, self._reducer, self._step = sharded, reducer, step
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

    def bring_writes(self) -> None:
        """Copy values that the script has written into parameters back to the masters. Raises DiskError."""
        for unit in self._sharded.units:
            if not unit.shard_params:
                unit.wait_unsharded()
                unit.writes.bring()

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
        step, sharded = self._step, self._sharded
        assert step is not None
        self._check_here()
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
        self._check_here()
        if any(part.leaf is None for part in self._step.slices):
            raise OptimizerError(
                "the optimizer's state is on NVMe: use engine.save_checkpoint and load_checkpoint"
            )
        return self._step

    def _check_here(self) -> None:
        """Raise OffloadedError if ``offload_states`` has moved a state to host memory."""
        for unit in self._sharded.units:
            unit.check_here(*STATES)

    def _shard_mark(self) -> dict[str, Any]:
        assert self._step is not None
        options, comm = self._sharded.options, self._sharded.comm
        return {
            "rank": comm.rank,
            "world_size": comm.world_size,
            "stage": options.shard_optimizer + options.shard_grads + options.shard_params,
            "shards": [[part.start, part.stop, part.group] for part in self._step.slices],
        }
