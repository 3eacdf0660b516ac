"""Builds the optimizer that steps the shards from the one that the script holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import OptimizerError


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
        optimizer: Any = object.__new__(type(outer))
        optimizer.__dict__.update(outer.__dict__)
        for name in ("step", "zero_grad"):
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
                if key in group and value is not before.get(key):
                    group[key] = value


_OWN_CHOICE = ("params", "param_names", "fused", "foreach")
"""Lists the entries that the inner optimizer keeps for itself."""


def _entries(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN_CHOICE}
