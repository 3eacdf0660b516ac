"""Defines what an engine does whose optimizer steps inside the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..config import ConfigError, Effective
from ..engine import Engine
from ..errors import OptimizerError
from ..log import say
from ..step_choice import collective_step_of
from ..zero.reduce import GradientReducer
from .reducer import SteppingReducer

E = TypeVar("E", bound=Engine)
_KEY = "zero_optimization.step_in_backward"


class SteppingEngine(Engine):
    """Is an engine whose backward pass steps each unit; :meth:`step` ends the step."""

    _restored_norm: float | None = None

    def attach(self, **parts: Any) -> None:
        """Take the engine's parts, and tell the step whose it is."""
        super().attach(**parts)
        assert isinstance(self._reducer, SteppingReducer) and self._shard_step is not None
        self._stepping = self._reducer.step
        config = self._effective.config
        by_value = config.zero_optimization.step_in_backward_clipping == "value"
        self._stepping.connect(self, self._shard_step, float(config.gradient_clipping), by_value)

    @property
    def previous_norm(self) -> float | None:
        """Return the norm of the last step's gradient, or of the checkpoint's; None before the first step."""
        norm = self.get_global_grad_norm()
        return self._restored_norm if norm is None else norm

    def _before_forward(self) -> None:
        self._stepping.check()
        super()._before_forward()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate the loss and step each unit. Raises OptimizerError for ``retain_graph``."""
        if retain_graph:
            raise OptimizerError(
                f"{_KEY} does not support backward(retain_graph=True): the backward pass updates parameters "
                "that the graph still needs"
            )
        return super().backward(loss, False, scale_wrt_gas)

    def set_batch(self, train: int, micro: int, accumulation: int) -> None:
        """Change the batch sizes. Raises OptimizerError for more than one micro-batch in a step."""
        if accumulation != 1:
            raise _accumulates(accumulation)
        super().set_batch(train, micro, accumulation)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Take note that each step is a boundary. Raises OptimizerError for False."""
        if not is_boundary:
            raise _accumulates("several")
        super().set_gradient_accumulation_boundary(is_boundary)

    def step(self, lr_kwargs: Any = None) -> None:
        """End the step. Raises OptimizerError if the backward pass has ended half-way."""
        if not self._stepping.has_gradients:
            self._stepping.check_unchanged()
        super().step(lr_kwargs)

    def _prepare_save(self) -> None:
        self._stepping.check()
        super()._prepare_save()

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Write the whole model's weights. Raises OptimizerError between backward pass and step."""
        self._stepping.check()
        return super().save_16bit_model(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint, also after a step that ended half-way."""
        was_changed, self._stepping.is_changed, path = self._stepping.is_changed, False, None
        try:
            path, state = super().load_checkpoint(*args, **kwargs)
        finally:
            if path is None:
                self._stepping.is_changed = was_changed
        return path, state

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Set the counters to a checkpoint's numbers, and the norm that the next step is clipped by."""
        super().restore_counters(counters)
        self._restored_norm = counters.get("previous_norm")


def _accumulates(steps: object) -> OptimizerError:
    return OptimizerError(
        f"{_KEY} does not support {steps} micro-batches per step: each backward pass is a step. Use a "
        "larger micro-batch or remove the key"
    )


def choose_backward_step(
    kind: type[E], optimizer: torch.optim.Optimizer | None, effective: Effective, comm: Comm, *, whole: bool
) -> tuple[type[E], type[GradientReducer]]:
    """Return the classes of an engine and its reducer that step in the backward pass, where the config asks
    for it and there is an ``optimizer``. ``whole``: that gets whole tensors.

    Raises ConfigError where a step has several micro-batches, OptimizerError for an optimizer that has to see
    more than one unit's gradient.
    """
    config = effective.config
    if not config.zero_optimization.step_in_backward or optimizer is None:
        return kind, GradientReducer
    if config.gradient_accumulation_steps != 1:
        raise ConfigError(
            [
                f"{effective.loaded.origin}: {_KEY}: gradient_accumulation_steps is "
                f"{config.gradient_accumulation_steps}, but each backward pass is a step: set it to 1"
            ]
        )
    if whole or collective_step_of(optimizer) is not None:
        raise OptimizerError(
            f"{_KEY} does not support optimizer {type(optimizer).__name__}, which needs whole parameters or "
            "other ranks' data: remove the key, or use an element-wise optimizer (Adam, AdamW, SGD, Lion)"
        )
    if comm.rank == 0:
        say(
            "step_in_backward: the optimizer steps each unit inside the backward pass; "
            f"{_clipping(effective)}"
        )
    return type(f"Stepping{kind.__name__}", (SteppingEngine, kind), {}), SteppingReducer


def _clipping(effective: Effective) -> str:
    clip = float(effective.config.gradient_clipping)
    if not clip:
        return "gradients are not clipped"
    if effective.config.zero_optimization.step_in_backward_clipping == "value":
        return f"each element of a gradient is clipped to {clip:g}"
    return (
        f"gradients are clipped to {clip:g} by the previous step's norm, in the first step by each unit's "
        "norm"
    )
