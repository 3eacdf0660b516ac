"""Defines what losses and gradients are divided by: every factor of every axis, in one place.

Note [Averaging]. Let each rank r of the data and sequence axes have a loss L(r, m) for each of N
micro-batches m. A step uses

    g = 1/D * sum over r and m of the gradient of  L(r, m) * S / N

with the loss scale S, which fp16 has (else 1), and D = S * (ranks of the data axis) * (ranks of the sequence
axis).

- Accumulation divides the losses, so that a sum in 16 bits stays in range.
- Data axis: D has its ranks, or 1 with ``gradient_allreduce_op`` "sum". Ranks with different experts train
  on different samples, so they count here. An expert's gradient is a sum over fewer ranks, but of the tokens
  of all: D is the same.
- Sequence axis: each rank's loss is that of whole sequences, so that its gradient is the part of its tokens
  times the number of ranks (``parallel.collectives.total``). D has that number with "sum", too.
- Tensor axis: ranks have the same loss, and gradients of their own parts. Pipeline axis: one stage has the
  loss. Neither counts.
- ``prescale_gradients`` divides by P what is sent, and D by P afterwards: rounding changes, nothing else.
  What a rank keeps for itself (1-bit optimizers) is not divided, and D is not either.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config
from .mesh import MeshShape


@dataclass(frozen=True, slots=True)
class Averaging:
    """Holds the factors of Note [Averaging] but for the loss scale."""

    accumulation: int
    """Counts the micro-batches of a step, whose losses are divided by it."""
    samples: int
    """Counts the ranks that train on different samples."""
    sequence: int
    """Counts the ranks that have different parts of the same sequences."""
    is_mean: bool
    """Tells whether gradients are averaged over samples; else they are added up."""
    predivide: float
    """Divides gradients before they are sent."""

    @classmethod
    def of(cls, config: Config, mesh: MeshShape) -> Averaging:
        """Return the factors of a resolved config on a mesh of ranks."""
        ranks = mesh.samples * mesh.sequence
        predivide = 1.0
        if config.prescale_gradients and ranks > 1:
            given = float(config.gradient_predivide_factor)
            predivide = given if given != 1.0 else float(ranks)
        return cls(
            accumulation=int(config.gradient_accumulation_steps or 1),
            samples=mesh.samples,
            sequence=mesh.sequence,
            is_mean=config.gradient_allreduce_op == "mean",
            predivide=predivide,
        )

    def divisor(self, *, is_predivided: bool) -> float:
        """Return the divisor of the sum of all ranks' gradients, but for the loss scale. ``is_predivided``:
        they were divided by ``predivide`` before they were sent.
        """
        whole = float(self.sequence * (self.samples if self.is_mean else 1))
        return whole / self.predivide if is_predivided else whole

    def table(self) -> list[tuple[str, str, str]]:
        """Return name, value and reason of each factor, for people."""
        data = f"data-parallel ranks {self.samples}" if self.is_mean else '1 (gradient_allreduce_op "sum")'
        divisor = f"{self.divisor(is_predivided=False):g}"
        rows = [
            ("each loss is divided by", f"{self.accumulation}", "gradient_accumulation_steps"),
            (
                "the sum of gradients is divided by",
                divisor,
                f"{data} * sequence ranks {self.sequence}",
            ),
        ]
        if self.predivide != 1.0:
            rows.append(
                (
                    "before the reduction, gradients are divided by",
                    f"{self.predivide:g}",
                    "prescale_gradients",
                )
            )
        return rows
