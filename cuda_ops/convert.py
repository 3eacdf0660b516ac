"""Casts with a factor."""

from __future__ import annotations

import torch
from torch import Tensor

from . import loader
from .arguments import FLOATS, Scalar, check_flat, check_scalar


@torch.no_grad()
def scaled_cast(src: Tensor, dst: Tensor, scale: Scalar) -> None:
    """``dst`` = ``src`` * ``scale``, computed in fp32 and rounded once, to the nearest.

    Both flat, of one length and device, each fp32, bf16 or fp16; they must not overlap unless they are the
    same. Reads and writes each element once: 4 bytes between two 16-bit types. Raises ValueError for wrong
    tensors.
    """
    check_flat("src", src, FLOATS)
    check_flat("dst", dst, FLOATS, src)
    check_scalar("scale", scale, src)
    if not loader.use_kernels(src):
        dst.copy_(src.float() * scale)
        return
    if src.numel():
        loader.launch(
            "convert",
            "scaled_cast",
            src,
            dst,
            src.numel(),
            *loader.scalar(scale),
            device=src.device,
            blocks=loader.vector_blocks(src),
            defines=(loader.define("SRC", src.dtype), loader.define("DST", dst.dtype)),
        )
