"""Runs the collectives of a group of ranks, counts their bytes, and packs what is quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...cuda_ops.quantize import (
    BLOCK,
    dequantize,
    dequantize_sum,
    packed_bytes,
    quantize,
    quantize_with_error,
)
from ..comm.link import Note, RankLink
from ..comm.pending import Pending, Work
from ..zero.layout import ALIGN_NUMEL

_BITS = 8
"""Bits of gathers: of parameters, and of the sums that reductions have left."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Says what a group sends in blocks of few bits (ZeRO++, arXiv 2306.10209)."""

    weights: bool = False
    """Gathers of trained parameters, in 8 bits."""
    frozen: bool = False
    """Gathers of frozen parameters, in 8 bits."""
    gradient_bits: int = 0
    """Bits of reductions; 0 sends them as they are."""
    beta: float | None = None
    """The part of the old error that LoCo keeps (arXiv 2407.04480); None is without error feedback."""
    reset_every: int = 0
    """Reductions of a unit after which its error is forgotten."""

    @property
    def any(self) -> bool:
        """Tell whether anything is quantised."""
        return self.weights or self.frozen or self.gradient_bits > 0


UNPACKED = Quantization()
"""Sends everything as it is."""


class PackedLink(RankLink):
    """Runs the collectives of a group.

    Through shared memory nothing is quantised: there a rank reads what the others have in place.

    Attributes
        moved: the bytes of its collectives, by the rules of ``Comm.moved``, packed where they are packed.
    """

    def __init__(self, plain: RankLink, quantization: Quantization) -> None:
        """Take over the process groups of ``plain``."""
        super().__init__(plain.device, plain.size, plain.position, plain.gather_group, plain.reduce_group)
        self.quantization = quantization
        if quantization.any:
            self.pieces = self.size * (BLOCK // ALIGN_NUMEL)  # no block crosses the end of a piece
        self.moved = 0
        self._errors: dict[int, Tensor] = {}
        """Keeps what quantisation has lost of each unit's gradients, by label."""
        self._count: dict[int, int] = {}

    def _add(self, nbytes: int) -> None:
        self.moved += nbytes if self.size > 1 else 0

    def rounds(self, trained: bool) -> bool:
        if self.shared is not None or self.size == 1:
            return False
        return self.quantization.weights if trained else self.quantization.frozen

    def all_gather(
        self, full: Tensor, source: Tensor, label: int, note: Note, rounded: bool = False
    ) -> Pending:
        if rounded:
            return self._gather_packed(full, source, label, note)
        self._add(full.nbytes)
        return super().all_gather(full, source, label, note)

    def all_gather_sums(self, full: Tensor, source: Tensor, label: int, note: Note) -> Pending:
        """Start to fill ``full`` from what reductions have left in every member's ``source``, in 8 bits if
        reductions are quantised.
        """
        return self.all_gather(full, source, label, note, self.quantization.gradient_bits > 0)

    def _gather_packed(self, full: Tensor, source: Tensor, label: int, note: Note) -> Pending:
        s = source.numel()
        n = packed_bytes(s, bits=_BITS)
        rows = torch.empty(self.size * n, dtype=torch.uint8, device=self.device)
        own = self.part_of(rows)
        quantize(source, own, bits=_BITS)
        self._add(rows.nbytes)

        def unpack() -> None:
            for row, part in zip(rows.split(n), full.split(s), strict=True):  # type: ignore[no-untyped-call]
                dequantize(row, part, bits=_BITS)

        return super().all_gather(rows, own, label, note).then(unpack)

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int, note: Note) -> Pending:
        bits, s = self.quantization.gradient_bits, bucket.numel() // self.size
        if not bits or self.size == 1 or self.shared is not None:
            self._add(bucket.nbytes)
            return super().reduce_scatter(shard, bucket, label, note)
        packed = torch.empty(self.size, packed_bytes(s, bits=bits), dtype=torch.uint8, device=bucket.device)
        error = self._error(bucket, label)
        for i, row in enumerate(packed):
            values = bucket[i * s : (i + 1) * s]
            if error is None:
                quantize(values, row, bits=bits)
            else:
                beta = self.quantization.beta or 0.0
                quantize_with_error(values, error[i * s : (i + 1) * s], row, bits=bits, beta=beta)
        self._add(packed.nbytes)
        got = torch.empty_like(packed)
        sent = dist.all_to_all_single(got, packed, group=self.reduce_group, async_op=True)
        return Work(sent, *note, packed).then(lambda: dequantize_sum(got, shard, bits=bits))

    def all_reduce(self, tensor: Tensor, label: int, note: Note) -> Pending:
        self._add(2 * tensor.nbytes)
        return super().all_reduce(tensor, label, note)

    def forget(self, label: int) -> None:
        self._errors.pop(label, None)

    def forget_errors(self) -> None:
        """Forget what quantisation has lost so far."""
        self._errors.clear()

    def _error(self, bucket: Tensor, label: int) -> Tensor | None:
        """Return the error of a unit, zeros at first and every so often; None without error feedback."""
        if self.quantization.beta is None:
            return None
        error, count = self._errors.get(label), self._count.get(label, 0)
        if error is None or error.dtype != bucket.dtype:  # passes that are added up are sent in fp32
            error = self._errors[label] = torch.zeros_like(bucket)
        elif count % self.quantization.reset_every == 0:
            error.zero_()
        self._count[label] = count + 1
        return error
