"""Defines an engine whose ranks have weights of their own between two exchanges of their optimizer."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch

from ..comm.collectives import Comm
from ..config import Effective
from ..engine import Engine
from .local_steps import refuse_local_steps
from .optimizers import ZeroOneAdam
from .step import ZeroOneAdamStep

E = TypeVar("E", bound=Engine)


class LocalStepsEngine(Engine):
    """Is an engine whose ranks agree on their weights before any is saved."""

    def agree(self, call: str, *, keeps_writes: bool = True) -> None:
        """Give all ranks the same weights and moments, as an exchange of the optimizer does, for a ``call``.
        Collective. Raises OptimizerError where ``keeps_writes`` and the script has changed them meanwhile,
        OffloadedError where states are away.
        """
        step = self._shard_step
        assert step is not None and isinstance(step.stepper, ZeroOneAdamStep)
        if not step.stepper.are_apart:
            return
        self._check_alive()
        self._states.check(call)
        self._resolve_last_step()
        if keeps_writes:
            self.handles.check()
            self.handles.bring_writes()
        step.agree_on_state()
        step.take_hyperparameters()
        groups, state = step.optimizer.param_groups, step.optimizer.state
        step.stepper.agree(groups, step.slices, state, keeps_writes=keeps_writes)

    def _prepare_save(self) -> None:
        super()._prepare_save()
        self.agree("engine.save_checkpoint()")

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Write the whole model's weights, on which the ranks have agreed."""
        self.agree("engine.save_16bit_model()")
        return super().save_16bit_model(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint; what it does not have is what the ranks have agreed on before."""
        self.agree("engine.load_checkpoint()", keeps_writes=False)
        return super().load_checkpoint(*args, **kwargs)

    def destroy(self) -> None:
        """Do as other engines, after the ranks have agreed. Where an exception is ending the run, the others
        may not be there: the ranks keep what they have.
        """
        try:
            if not self._destroyed and sys.exc_info()[0] is None:
                self.agree("engine.destroy()", keeps_writes=False)
        finally:
            super().destroy()


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
        "sequence parallelism is on": comm.mesh.sequence > 1,
    }
    most = max(group["local_step_clipper"] for group in optimizer.param_groups)
    refuse_local_steps(most, reasons)
    if stage > 0:
        return kind
    return type(f"LocalSteps{kind.__name__}", (LocalStepsEngine, kind), {})
