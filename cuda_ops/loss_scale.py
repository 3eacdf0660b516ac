"""Dynamic loss scaling whose state stays on the device, so that no step waits for its overflow flag.

The rules are those of ``runtime.precision.LossScaler``; the host reads
``at_floor`` when it pleases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import loader
from .arguments import Scalar, check_scalar
from .twins import as_tensor


class LossScaleState:
    """State of the loss scaler. ``values``: float64 of 9 elements on ``device``, exact for any count of
    steps.

    They are: the scale, overflows left before it shrinks, steps, the step of the last overflow, whether one
    came at the smallest scale; then the constants window, min_scale, hysteresis, consecutive_hysteresis.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        scale: float,
        window: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> None:
        if window < 1:
            raise ValueError(f"window is {window}, expected 1 or more")
        constants = (window, min_scale, hysteresis, consecutive_hysteresis)
        values = [scale, hysteresis, 0, -1, 0, *map(float, constants)]
        self.values = torch.tensor(values, dtype=torch.float64, device=device)

    @property
    def scale(self) -> Tensor:
        """Return what current losses are multiplied with: a 0-dim float32 tensor, a copy."""
        return self.values[0].float()

    @property
    def at_floor(self) -> Tensor:
        """Return 1 once gradients have overflowed at ``min_scale``, where LossScaler raises: a 0-dim
        float64 view.
        """
        return self.values[4]

    def state_dict(self) -> dict[str, float | int]:
        """Return the state in LossScaler's form; waits for the device."""
        scale, left, step, last_overflow = self.values[:4].tolist()
        return {"scale": scale, "left": int(left), "step": int(step), "last_overflow": int(last_overflow)}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Take over what :meth:`state_dict` gave."""
        numbers = [float(state[name]) for name in ("scale", "left", "step", "last_overflow")]
        self.values[:5] = torch.tensor([*numbers, 0.0], dtype=torch.float64)


@torch.no_grad()
def update_loss_scale(state: LossScaleState, found_inf: Scalar) -> None:
    """Take note of one optimizer step, in place; ``found_inf``: not 0 if its gradients had inf or NaN.

    An overflow at the smallest scale sets ``at_floor`` for good and changes nothing else. Raises ValueError
    for a tensor that is not 0-dim float32 or on another device.
    """
    values = state.values
    check_scalar("found_inf", found_inf, values)
    if loader.use_kernels(values):
        arguments = loader.scalar(found_inf)
        loader.launch("scalars", "update_loss_scale", values, *arguments, device=values.device, blocks=1)
        return
    scale, left, steps, last_overflow, at_floor, window, min_scale, hysteresis, consecutive = values.unbind()
    overflow = as_tensor(found_inf, values) != 0
    shrink = overflow & (left <= 1)
    stuck = shrink & (scale <= min_scale)
    since = steps - last_overflow - 1
    grow = ~overflow & (since > 0) & (torch.fmod(since, window) == 0)
    refill = grow | (~overflow & (consecutive != 0))
    smaller = torch.maximum(scale / 2, min_scale)
    later = (
        torch.where(shrink, smaller, torch.where(grow, scale * 2, scale)),
        torch.where(refill, hysteresis, torch.where(overflow & ~shrink, left - 1, left)),
        steps + 1,
        torch.where(overflow, steps, last_overflow),
    )
    changed = [torch.where(stuck, old, new) for old, new in zip(values[:4].unbind(), later, strict=True)]
    values[:5] = torch.stack([*changed, torch.maximum(at_floor, stuck.double())])
