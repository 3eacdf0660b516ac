"""What ``deepspeed.initialize`` returns second, and its bases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.runtime.handles.optimizer import ZeroOptimizer
from zlaunch.runtime.zero.ownership import MASTERS

_unknown = absent("engine.optimizer")


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Base class, for ``isinstance``."""


class _Hooks:
    """A list of hooks to remove, and the way to put them back. It is empty: a parameter that
    ``GatheredParameters`` holds is not touched by ours.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: the hooks have stayed."""


class ZeROOptimizer(ZeroOptimizer, DeepSpeedOptimizer):
    """The engine's optimizer as DeepSpeed scripts see it, with DeepSpeed's further members.

    Attributes
        overflow: whether the last step was skipped.
        loss_scale, cur_scale: what losses are multiplied with.
    """

    _engine: Any  # the whole engine, whose state these members show

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _unknown(name)

    @property
    def optimizer(self) -> ZeROOptimizer:
        """Return itself: there is one optimizer, not one inside another."""
        return self

    @property
    def overflow(self) -> bool:
        """Tell whether the last step left everything as it was, because gradients were not finite."""
        return bool(self._engine.overflow)

    @property
    def loss_scale(self) -> float:
        """Return the loss scale: 1 but for fp16."""
        return float(self._engine._scaler.scale)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Tell whether this is fp16 with a scale that adapts."""
        return bool(self._engine._scaler.dynamic)

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Copy this rank's masters, a flat tensor a param group."""
        step = self._engine._shard_step
        assert step is not None
        self._engine._states.check("fp32_partitioned_groups_flat", MASTERS)
        return [
            torch.cat([leaf.detach().reshape(-1) for leaf in group["params"]])
            if group["params"]
            else torch.empty(0)
            for group in step.optimizer.param_groups
        ]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    @property
    def parameter_offload(self) -> _Hooks:
        """Return what scripts take the hooks from around a generation, inside GatheredParameters; stage 3
        only.
        """
        if self._engine.zero_optimization_stage() < 3:
            raise AttributeError("parameter_offload: parameters are sharded only at stage 3")
        return _Hooks(self._engine.module)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Call the engine's backward."""
        self._engine.backward(loss, retain_graph=retain_graph)
