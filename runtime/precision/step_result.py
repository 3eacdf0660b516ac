"""The numbers of one optimizer step, and their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class StepResult:
    """What a step did. On a GPU the numbers are on their way to the host; who asks early waits for them."""

    def __init__(
        self,
        norm: float | Tensor,
        skipped: bool | Tensor,
        stop: float | Tensor,
        differs: bool | Tensor = False,
    ) -> None:
        self._facts = (norm, skipped, stop, differs)
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
        """Of the averaged, unscaled gradient before clipping."""
        return self._read()[0]

    @property
    def skipped(self) -> bool:
        """Its gradients were not finite, and that was checked."""
        return self._read()[1] > 0

    @property
    def stop(self) -> bool:
        """Some rank has been asked to save and stop; the same on all ranks."""
        return self._read()[2] > 0

    @property
    def differs(self) -> bool:
        """The ranks have used the model in different orders; the step changed nothing."""
        return self._read()[3] > 0

    @property
    def stuck(self) -> bool:
        """Gradients overflowed at the smallest loss scale."""
        return self._read()[4] > 0

    @property
    def skipped_flag(self) -> bool | Tensor:
        """``skipped`` where it is: 0 or 1 on the device, or known."""
        return self._facts[1]

    @property
    def known(self) -> bool:
        """Whether asking would not wait."""
        return self._values is not None
