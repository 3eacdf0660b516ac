"""Adds up a step's losses over micro-batches and ranks, and notices ranks that train on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .device import HostCopy
from .log import warn

_WATCHED_STEPS = 20
"""Limits the steps in which losses are compared: ranks that read the same samples do from the first."""
_EQUAL_STEPS = 3
_SAME = (
    "the losses of all {ranks} data-parallel ranks were identical for {steps} steps: the ranks probably "
    "train on the same samples. Iterate over engine.dataloader(loader), or use a DistributedSampler with "
    "num_replicas=engine.data_parallel_size and rank=engine.data_parallel_rank"
)
_WORDS = 2
_WORD_BITS = 16


class StepLosses:
    """Collects the losses of this rank's micro-batches; the step sums :meth:`numbers` over the ranks."""

    def __init__(self, device: torch.device, *, rank: int, world_size: int, samples: int) -> None:
        """``samples`` counts the ranks that train on different samples; 1 where losses are not compared."""
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._samples = samples
        self._sum: Tensor | None = None
        self._weight: float | Tensor = 0.0
        self._has_some = False
        self._steps = self._equal = 0
        self._coming: list[HostCopy] = []
        self._has_warned = False
        self.mean: float | Tensor | None = None
        """Is the mean of the last step's losses, a number or 0-dim on the device; None where this rank had
        none.
        """

    def note(self, loss: Tensor, *, is_share: bool = False, tokens: int | Tensor | None = None) -> None:
        """Add the loss of one micro-batch, if it is a single number. ``is_share``: the caller has divided it,
        so that the losses of a step add up. ``tokens``: the number of tokens that it is a mean of, which is
        its weight; None where all losses have the same.
        """
        if loss.numel() != 1:
            return
        value = loss.detach().reshape(()).double()
        if tokens is not None:
            value = value * tokens
        self._sum = value if self._sum is None else self._sum + value
        self._has_some = True
        self._weight = 1.0 if is_share else self._weight + (1.0 if tokens is None else tokens)

    def clear(self) -> None:
        """Forget the losses since the last step."""
        self._sum = None
        self._weight = 0.0
        self._has_some = False

    def numbers(self) -> Tensor:
        """Return the sum of the losses and that of their weights, and in the first steps what tells whether
        the sums of all ranks are equal to the bit: as many numbers on all ranks.

        Of each part of the bits, w, there are w and its square: n ranks have equal ones if n times the sum
        of the squares is the square of the sum. Both are exact in float64 for up to 1024 ranks.
        """
        own = torch.zeros((), device=self._device, dtype=torch.float64) if self._sum is None else self._sum
        own = own.to(self._device)
        weight = torch.zeros_like(own) + self._weight
        if not self._compares:
            return torch.stack([own, weight])
        bits = own.to(torch.float32).view(torch.int32)
        mask = (1 << _WORD_BITS) - 1
        words = [(bits >> (_WORD_BITS * at) & mask).double() for at in range(_WORDS)]
        return torch.stack([own, weight, *words, *(word.square() for word in words)])

    def take(self, sums: Sequence[float] | Tensor) -> None:
        """Take the sums over the ranks at the end of a step, where they are, and begin the next one."""
        self.mean = self.weighted_mean(sums) if self._has_some else None
        self.clear()
        if not self._compares:
            return
        # what the host has stays there: work for the device would be waited for later
        sums = sums if isinstance(sums, Tensor) else torch.tensor(sums, dtype=torch.float64)
        words = sums[2 : 2 + _WORDS]
        squares = sums[2 + _WORDS :]
        is_equal = (squares * self._world_size == words.square()).all()
        # zero and infinity are equal for other reasons than equal samples
        is_equal = is_equal & (sums[0] != 0) & sums[0].isfinite()
        self._coming.append(HostCopy([is_equal.double()]))
        self._steps += 1
        self._look()

    @staticmethod
    def weighted_mean(sums: Sequence[float] | Tensor) -> float | Tensor:
        """Return the mean loss of a step from the sums over the ranks; NaN where nothing has a weight."""
        if isinstance(sums, Tensor):
            return sums[0] / sums[1]
        return sums[0] / sums[1] if sums[1] else math.nan

    @staticmethod
    def total_weight(sums: Sequence[float] | Tensor) -> float | Tensor:
        """Return the sum of the losses' weights from the sums over the ranks."""
        return sums[1]

    @property
    def _compares(self) -> bool:
        """Tell whether this step's losses are compared: by the count of steps alone, which is equal on all
        ranks. What has arrived on the host is not, and :meth:`numbers` must have one length.
        """
        return self._samples > 1 and self._steps < _WATCHED_STEPS

    def _look(self) -> None:
        """Count equal steps among those whose comparison has arrived on the host; warn once."""
        while self._coming and self._coming[0].has_arrived:
            found = self._coming.pop(0).read()[0] > 0
            self._equal = self._equal + 1 if found else 0
            if self._equal >= _EQUAL_STEPS and not self._has_warned:
                self._has_warned = True
                if self._rank == 0:
                    warn(_SAME.format(ranks=self._samples, steps=_EQUAL_STEPS))
