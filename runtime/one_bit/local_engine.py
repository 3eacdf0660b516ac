"""Defines an engine whose ranks have weights of their own between two exchanges of their optimizer."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..comm.collectives import Comm
from ..config import Effective
from ..engine import Engine
from ..errors import OptimizerError
from .optimizers import ZeroOneAdam
from .step import ZeroOneAdamStep

E = TypeVar("E", bound=Engine)


class LocalStepsEngine(Engine):
    """Is an engine whose ranks agree on their weights before any is saved."""

    def agree(self) -> None:
        """Give all ranks the same weights and moments, as an exchange of the optimizer does. Collective."""
        assert self._shard_step is not None
        stepper = self._shard_step.stepper
        assert isinstance(stepper, ZeroOneAdamStep)
        self._shard_step.take_hyperparameters()
        optimizers = self._shard_step.optimizer, self._shard_step.outer
        if stepper.agree(optimizers[0].param_groups, self._shard_step.slices, optimizers[0].state):
            for group in optimizers[1].param_groups:
                group["local_rate_sum"] = 0.0

    def _prepare_save(self) -> None:
        super()._prepare_save()
        self.agree()

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Write the whole model's weights, on which the ranks have agreed."""
        self.agree()
        return super().save_16bit_model(*args, **kwargs)


def choose_local_steps(
    kind: type[E], optimizer: torch.optim.Optimizer | None, effective: Effective, comm: Comm
) -> type[E]:
    """Return the class of an engine whose optimizer makes steps that no other rank knows of, if it does.

    Raises OptimizerError where a rank does not have whole weights and states of its own.
    """
    if not isinstance(optimizer, ZeroOneAdam):
        return kind
    stage = int(effective.config.zero_optimization.stage)
    reasons = {
        f"zero_optimization.stage is {stage}": stage > 0,
        "ranks share sequences": comm.mesh.sequence > 1,
    }
    most = max(group["local_step_clipper"] for group in optimizer.param_groups)
    for reason in (text for text, is_so in reasons.items() if is_so):
        if most > 1:
            raise OptimizerError(
                f"ZeroOneAdam: local_step_clipper {most}: in local steps each rank has whole weights of its "
                f"own, and {reason}: set local_step_clipper to 1"
            )
    if stage > 0:
        return kind
    return type(f"LocalSteps{kind.__name__}", (LocalStepsEngine, kind), {})
