"""What ``deepspeed.initialize`` returns second, and its bases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zlaunch.compat.deepspeed.missing import absent

if TYPE_CHECKING:
    from zlaunch.runtime.engine import Engine

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
        """They have stayed."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The engine's optimizer as DeepSpeed scripts see it: a view of the torch optimizer over the shards.

    Attributes
        optimizer: that torch optimizer; ``param_groups``, ``state`` and ``defaults`` are its own.
        overflow: whether the last step was skipped.
        loss_scale, cur_scale: what losses are multiplied with.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Not torch's: there is one set of groups, the wrapped optimizer's."""
        self._engine, self.optimizer = engine, optimizer

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "optimizer"):
            raise AttributeError(name)
        try:
            return getattr(self.optimizer, name)
        except AttributeError:
            return _unknown(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the optimizer of an engine cannot be pickled: use engine.save_checkpoint")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live: schedules write ``lr`` here."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Of this rank's shards."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Whether the last step left everything as it was, because gradients were not finite."""
        return self._engine.overflow

    @property
    def loss_scale(self) -> float:
        """1 but for fp16."""
        return self._engine._scaler.scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """fp16 with a scale that adapts."""
        return self._engine._scaler.dynamic

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's masters, a flat tensor a param group (copies)."""
        return [
            torch.cat([leaf.detach().reshape(-1) for leaf in group["params"]])
            if group["params"]
            else torch.empty(0)
            for group in self.param_groups
        ]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    @property
    def parameter_offload(self) -> _Hooks:
        """Stage 3 only: what scripts take the hooks from around a generation, inside GatheredParameters."""
        if self._engine.zero_optimization_stage() < 3:
            raise AttributeError("parameter_offload: parameters are sharded at stage 3 alone")
        return _Hooks(self._engine.module)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's step: at the accumulation boundary, the update."""
        if closure is not None:
            raise ValueError("a closure would have to run the backward pass: call engine.backward first")
        self._engine.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: parameters are cut into shards by ``initialize``."""
        raise ValueError(
            "parameters are settled by initialize: call deepspeed.initialize again with the new ones"
        )

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The engine's."""
        self._engine.backward(loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far."""
        self._engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards alone: to save and resume, use ``engine.save_checkpoint``."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """What :meth:`state_dict` gave on this rank."""
        self.optimizer.load_state_dict(state_dict)
