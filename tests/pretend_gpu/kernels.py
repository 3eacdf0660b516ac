"""Run our CUDA kernels on the pretended GPU: compiled for the CPU, with what each reads and writes noted."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from tests.unit.cuda_ops.test_kernels_shim import CpuKernels, kernels_of
from zlaunch.cuda_ops import loader

from .clocks import lock
from .memory import is_on_device, launch, touch_bytes
from .streams import current_stream

launched: list[NotedKernels] = []
"""Holds the stand-in that :func:`install` has put in place."""
_ROW = 3
"""Numbers of a row of norm.cu's table: address, elements, first block."""


class NotedKernels(CpuKernels):
    """Stands in for ``loader.launch``. A pointer to const is read, any other is read and written."""

    def __call__(
        self,
        name: str,
        kernel: str,
        *arguments: Tensor | float | None,
        device: torch.device,
        blocks: int,
        defines: tuple[str, ...] = (),
    ) -> None:
        given = list(zip(kernels_of(name)[kernel], arguments, strict=True))
        tensors = [(parameter, value) for parameter, value in given if isinstance(value, Tensor)]
        wrong = [parameter for parameter, value in tensors if not is_on_device(value)]
        assert device.type == "cuda" and not wrong, f"{kernel}: {wrong} of the host"
        stream = current_stream()
        with lock:  # the kernels have global variables
            super().__call__(
                name, kernel, *arguments, device=torch.device("cpu"), blocks=blocks, defines=defines
            )
            reads = [value for _, value in tensors]
            writes = [value for parameter, value in tensors if not parameter.startswith("const ")]
            launch(kernel, reads, writes, stream.actor)
            table = arguments[0]
            if kernel == "square_sums" and isinstance(table, Tensor):
                width = 4 if "FLOAT32" in defines[0] else 2
                numbers = (ctypes.c_int64 * table.numel()).from_address(table.data_ptr())
                for at in range(0, table.numel() - _ROW, _ROW):
                    touch_bytes(
                        kernel, numbers[at], numbers[at + 1] * width, writes=False, actor=stream.actor
                    )


def install(library: str) -> None:
    """Let the runtime use the kernels of a library that ``build`` of test_kernels_shim has made."""
    kernels: Any = NotedKernels(ctypes.CDLL(library))
    loader.use_kernels = lambda tensor: is_on_device(tensor) and loader.mode() != "torch"
    loader.launch = kernels
    launched.append(kernels)
    os.environ["ZLAUNCH_KERNELS"] = "auto"
