"""Random numbers of a dataset or sampler that draws from the global generators: the same on all ranks.

Ranks and worker processes that share out one order have to draw the same one, and a resumed run has to draw
it again. The model keeps its own numbers: a draw for data takes none of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import numpy
import torch

T = TypeVar("T")

LARGEST_SEED = 1 << 63
"""Bounds the seeds of torch's generators."""
_LARGEST_NUMPY = 1 << 32


class Draws:
    """Holds generators of torch (on the CPU), Python and numpy, which begin with a seed."""

    def __init__(self, seed: int) -> None:
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed % LARGEST_SEED).get_state()
        self._python = random.Random(seed).getstate()
        # numpy takes 36 us to copy a state, and nothing to change the generator.
        self._numpy = numpy.random.MT19937(numpy.random.SeedSequence(seed % _LARGEST_NUMPY))

    def begin_anew(self, seed: int) -> None:
        """Go on with another seed, within :meth:`active`."""
        self._begin(seed)
        self._activate()

    def _activate(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the global generators be these ones."""
        torchs = torch.get_rng_state()
        pythons = random.getstate()
        numpys = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        self._activate()
        try:
            yield
        finally:
            self._torch = torch.get_rng_state()
            self._python = random.getstate()
            torch.set_rng_state(torchs)
            random.setstate(pythons)
            numpy.random.set_bit_generator(numpys)  # type: ignore[attr-defined]

    def blocks(self, units: Iterator[T], size: int) -> Iterator[list[T]]:
        """Yield the units in blocks of ``size``, each read with these generators; the last may be smaller."""
        while True:
            with self.active():
                block = list(islice(units, size))
            if not block:
                return
            yield block
