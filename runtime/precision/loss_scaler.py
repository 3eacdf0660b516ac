"""Scales losses, statically or dynamically, for fp16.

The dynamic rule is that of "Mixed Precision Training" (Micikevicius et al., 2018) with the hysteresis of
Megatron and DeepSpeed: a few overflows are tolerated before the scale shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.loss_scale import LossScaleState, update_loss_scale
from ..errors import LossScaleFloorError
from .step_result import StepResult


def floor_error(min_scale: float, names: Sequence[str] = ()) -> LossScaleFloorError:
    """Build the error; ``names`` are the parameters whose gradients overflow."""
    more = " ..." if len(names) > 10 else ""
    which = f"Affected parameters: {', '.join(names[:10])}{more}. " if names else ""
    return LossScaleFloorError(
        f"gradients overflow at the minimum loss scale, {min_scale:g}: the model itself produces inf or "
        f"NaN. {which}Try bf16 or a lower learning rate, or check the input data"
    )


@dataclass(slots=True)
class LossScaler:
    """Keeps the factor that the loss is multiplied with.

    ``scale`` is the factor of the *current* gradients; call :meth:`update` only after they have been unscaled
    with it.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    """Counts the steps without overflow after which the scale doubles."""
    min_scale: float = 1.0
    hysteresis: int = 2
    """Counts the overflows that are tolerated before the scale is halved."""
    consecutive_hysteresis: bool = False
    """Refill the hysteresis after every good step, not only when the scale grows."""
    _left: int = field(init=False)
    _step: int = field(init=False, default=0)
    _last_overflow: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._left = self.hysteresis

    @property
    def factor(self) -> float:
        """Return the factor that the loss is multiplied with."""
        return self.scale

    @property
    def used(self) -> bool:
        """Tell whether losses are scaled at all."""
        return self.dynamic or self.scale != 1.0

    def update(self, result: StepResult) -> None:
        """Count one optimizer step. Raises LossScaleFloorError if the scale can shrink no further."""
        # only a dynamic scale depends on it: on a GPU, asking waits for the step
        self.note(self.dynamic and result.skipped)

    def note(self, overflow: bool) -> None:
        """Count one optimizer step by whether it overflowed."""
        if self.dynamic:
            if overflow:
                self._shrink()
            else:
                self._maybe_grow()
        self._step += 1

    def _shrink(self) -> None:
        if self._left <= 1:
            if self.scale <= self.min_scale:
                raise floor_error(self.min_scale)
            self.scale = max(self.scale / 2.0, self.min_scale)
        else:
            self._left -= 1
        self._last_overflow = self._step

    def _maybe_grow(self) -> None:
        if self.consecutive_hysteresis:
            self._left = self.hysteresis
        since = self._step - self._last_overflow - 1
        if since > 0 and since % self.window == 0:
            if not self.consecutive_hysteresis:
                self._left = self.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, enough to go on exactly."""
        return {
            "scale": self.scale,
            "left": self._left,
            "step": self._step,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.scale = float(state["scale"])
        self._left, self._step = int(state["left"]), int(state["step"])
        self._last_overflow = int(state["last_overflow"])


class DeviceLossScaler:
    """Scales the loss by LossScaler's dynamic rule with the state on the device: no step waits for it."""

    dynamic = used = True

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self.min_scale = scaler.min_scale
        self._state = LossScaleState(
            device,
            scale=scaler.scale,
            window=scaler.window,
            min_scale=scaler.min_scale,
            hysteresis=scaler.hysteresis,
            consecutive_hysteresis=scaler.consecutive_hysteresis,
        )

    @property
    def factor(self) -> Tensor:
        """Return the factor that the loss is multiplied with: 0-dim fp32 on the device."""
        return self._state.scale

    @property
    def scale(self) -> float:
        """Return the factor as a number; waits for the device."""
        return float(self._state.scale)

    def update(self, result: StepResult) -> None:
        """Count one optimizer step; the result's numbers tell whether the scale can shrink."""
        flag = result.skipped_flag
        update_loss_scale(self._state, flag if isinstance(flag, Tensor) else float(flag))
        result.send(self._state.at_floor)
        if result.known and self._state.at_floor:
            raise floor_error(self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what LossScaler's does; waits for the device."""
        return dict(self._state.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._state.load_state_dict(state)
