"""Puts the loss scale into a backward pass, at whichever tensor that begins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class LossScaling:
    """Multiplies gradients by the loss scale where a backward pass enters the model, unless the loss has been
    multiplied already.

    Attributes
        factor: what a loss is to be multiplied with; None where nothing is.
        micro_share: a micro-batch's part of a step, for a backward pass that the caller starts.
        loss_is_scaled: the backward pass that is under way, or comes next, starts at a loss multiplied
            already.
    """

    def __init__(self) -> None:
        self.factor: Callable[[], float | Tensor] | None = None
        self.micro_share: Callable[[], float] = lambda: 1.0
        self.loss_is_scaled = False
        self._at_outputs = False

    def end(self) -> None:
        """Forget how the pass began."""
        self.loss_is_scaled = self._at_outputs = False

    def at_output(self, grad: Tensor) -> Tensor | None:
        """Scale the gradient of one of the model's outputs; return None to leave it unchanged."""
        if self.factor is None or self.loss_is_scaled:
            return None
        self._at_outputs = True
        # in fp32: a scale of 65536 is infinite in fp16, and torch would cast a 0-dim tensor to it
        return (grad.to(torch.promote_types(grad.dtype, torch.float32)) * self.factor()).to(grad.dtype)

    def of_parameter(self, grad: Tensor) -> Tensor:
        """Return a parameter's gradient as its part of the step, in a pass that did not begin at a scaled
        loss. Raises RuntimeError where it did not begin at the model's outputs either.
        """
        if self.factor is not None and not self._at_outputs:
            raise RuntimeError(
                "fp16 needs engine.backward(loss), or engine.scale(loss).backward(): this backward pass does "
                "not start at the model's outputs, where zlaunch applies the loss scale"
            )
        share = self.micro_share()
        return grad if share == 1.0 else grad * share
