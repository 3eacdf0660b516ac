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
- ``loss_reduction`` "tokens": the loss L(r, m) is a mean over n(r, m) tokens, and each token counts the same:

      g = 1/T * sum over r and m of the gradient of  L(r, m) * n(r, m),   T = sum of n(r, m)

  T is known once all ranks have ended their passes: the step's all-reduce sums n. Until then losses are
  multiplied by S * n / (1024 * N) instead of S / N, and D = S * T / (1024 * N) * (ranks of the sequence
  axis). The factor 1024 keeps sums in 16 bits in range, and rounds nothing. Ranks of a tensor, sequence or
  pipeline group count the same tokens: T is the sum over all ranks divided by their number.
- ``prescale_gradients`` divides by P what is sent, and D by P afterwards: rounding changes, nothing else.
  What a rank keeps for itself (1-bit optimizers) is not divided, and D is not either.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .config import Config
from .mesh import MeshShape

_TOKENS_SCALE = 1024.0
"""Divides numbers of tokens: see Note [Averaging]."""


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
    by_tokens: bool
    """Weights losses by their numbers of tokens."""
    sharers: int
    """Number of ranks that count the same tokens: of a tensor, a sequence and a pipeline group together."""

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
            by_tokens=config.loss_reduction == "tokens",
            sharers=mesh.tensor * mesh.sequence * mesh.pipeline,
        )

    def share(self, scale: float | Tensor, tokens: int | Tensor | None) -> float | Tensor:
        """Return the factor of a micro-batch's loss. ``scale`` is the loss scale; ``tokens`` its number of
        tokens, None where losses are not weighted.
        """
        if tokens is None:
            return scale / self.accumulation
        return scale * tokens / (_TOKENS_SCALE * self.accumulation)

    def divisor(self, *, is_predivided: bool, tokens: float | Tensor = 0.0) -> float | Tensor:
        """Return the divisor of the sum of all ranks' gradients, but for the loss scale.

        ``is_predivided``: they were divided by ``predivide`` before they were sent. ``tokens``: the tokens
        that the ranks have counted in the step, summed over all ranks; used only if losses are weighted by
        them. A step without any token has gradients of zero, which are divided as for one token.
        """
        whole: float | Tensor = float(self.sequence * (self.samples if self.is_mean else 1))
        if self.by_tokens:
            least = tokens.clamp(min=1.0) if isinstance(tokens, Tensor) else max(tokens, 1.0)
            whole = least * (self.sequence / (self.sharers * _TOKENS_SCALE * self.accumulation))
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
        if self.by_tokens:
            rows = [
                ("each loss is multiplied by", "its number of tokens", "loss_reduction"),
                ("the sum of gradients is divided by", "the step's number of tokens", "loss_reduction"),
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
