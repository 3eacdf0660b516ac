"""Keeps the numbers of one optimizer step, and sends them to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StepResult:
    """Keeps what a step did. On a GPU the numbers are on their way to the host; reading waits for them."""

    def __init__(
        self,
        norm: float | Tensor,
        skipped: bool | Tensor,
        stop: float | Tensor,
        differs: bool | Tensor = False,
        *,
        beside: Sequence[float] | Tensor,
    ) -> None:
        self._facts = (norm, skipped, stop, differs)
        self.beside = beside
        """Holds the sums over the ranks of what the step was given beside its own numbers, on the device if
        the host has not waited for the step's.
        """
        self._values: tuple[float, ...] | None = None
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if not isinstance(norm, Tensor):
            self._values = norm, float(skipped), float(stop), float(differs), 0.0

    def send(self, stuck: Tensor | None) -> None:
        """Start to copy the numbers to the host, and with them whether the loss scale cannot shrink."""
        if self._values is not None or self._host is not None:
            return
        device = self._facts[0].device  # type: ignore[union-attr]
        stuck = torch.zeros((), device=device) if stuck is None else stuck
        values = torch.stack([torch.as_tensor(fact).double() for fact in (*self._facts, stuck)])
        if device.type != "cuda":
            self._host = values
            return
        self._host = torch.empty(5, dtype=torch.float64, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def _read(self) -> tuple[float, ...]:
        if self._values is None:
            if self._host is None:
                self.send(None)
            if self._event is not None:
                self._event.synchronize()
            assert self._host is not None
            self._values = tuple(self._host.tolist())
        return self._values

    @property
    def norm(self) -> float:
        """Return the norm of the averaged, unscaled gradient before clipping."""
        return self._read()[0]

    @property
    def skipped(self) -> bool:
        """Tell whether the step was skipped: its gradients were checked and not finite."""
        return self._read()[1] > 0

    @property
    def stop(self) -> bool:
        """Tell whether some rank has been asked to save and stop; equal on all ranks."""
        return self._read()[2] > 0

    @property
    def differs(self) -> bool:
        """Tell whether the ranks have used the model in different orders; the step then changed nothing."""
        return self._read()[3] > 0

    @property
    def stuck(self) -> bool:
        """Tell whether gradients overflowed at the smallest loss scale."""
        return self._read()[4] > 0

    @property
    def skipped_flag(self) -> bool | Tensor:
        """Return ``skipped`` where it is: 0 or 1 on the device, or a bool that is known."""
        return self._facts[1]

    @property
    def norm_there(self) -> float | Tensor:
        """Return ``norm`` where it is: 0-dim on the device, or a number that is known."""
        return self._facts[0]

    @property
    def known(self) -> bool:
        """Tell whether the numbers can be read without a wait."""
        return self._values is not None
