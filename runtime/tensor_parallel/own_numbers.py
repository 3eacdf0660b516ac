"""Gives ranks that share layers different random numbers where they have different activations."""

from __future__ import annotations

import torch


class OwnNumbers:
    """Seeds the generators of the CPU and the device with a seed of this rank's own between a layer that is
    cut by columns and the next that is cut by rows, so that dropout drops other places of other heads.

    The seed is drawn from the state that all ranks of the axis have, which goes on afterwards: a
    recomputation from that state draws the same.
    """

    def __init__(self, position: int, device: torch.device) -> None:
        self._position, self._device = position, device
        self._seed = 0
        self._outside: list[torch.Tensor] | None = None

    def open(self) -> None:
        """Begin with the own numbers, unless they have begun."""
        if self._is_inside():
            return
        self._seed = int(torch.randint(1 << 62, ())) + self._position
        self._outside = [torch.get_rng_state()]
        torch.default_generator.manual_seed(self._seed)
        if self._device.type == "cuda":
            self._outside.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.manual_seed(self._seed)  # of the current device, which is this one

    def close(self) -> None:
        """Go on with the numbers of all ranks, if the own ones have begun."""
        if self._is_inside() and self._outside is not None:
            torch.set_rng_state(self._outside[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._outside[1], self._device)
        self._outside = None

    def _is_inside(self) -> bool:
        """Tell whether the own numbers are drawn now: a recomputation that ended early, or an exception, may
        have left without :meth:`close`, and somebody else has restored the state.
        """
        return self._outside is not None and torch.default_generator.initial_seed() == self._seed
