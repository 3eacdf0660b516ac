"""Which implementation runs, and how a kernel gets compiled and launched.

A kernel file is the text of ``kernels/common.cu`` (and of ``rules.cu`` for steps) followed by its own,
compiled by NVRTC through CuPy for the device at hand when it is first launched, once for each set of ``-D``
options. CuPy keeps the binaries on disk in its own cache (``~/.cupy/kernel_cache``), keyed by source,
options, architecture and compiler version, so later processes only load them.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arguments import Scalar

THREADS = 256
MAX_BLOCKS = 4096
"""Enough to fill any device; the kernels stride over what is left."""
VECTOR = 4
"""Elements a thread takes at a time: 16 bytes of fp32."""
OPTIONS = ("--std=c++17", f"-DTHREADS={THREADS}")

_MODES = ("auto", "cupy", "torch")
_mode = "auto"
_SUFFIX = {
    torch.float32: "FLOAT32",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.uint8: "CODES",
}


def set_mode(mode: str) -> None:
    """Choose the implementation for the whole process.

    "auto": kernels for CUDA tensors where CuPy can be used, else torch, with one warning that says why; on
    the CPU the fastest there is. "cupy": an error where a CUDA tensor meets no CuPy. "torch": the twins in
    plain torch, everywhere. Raises ValueError for another word.
    """
    global _mode
    if mode not in _MODES:
        close = difflib.get_close_matches(mode, _MODES, 1, 0.5)
        advice = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(_MODES)}"
        raise ValueError(f"kernel mode {mode!r}: {advice}")
    _mode = mode
    _warn_once.cache_clear()


def mode() -> str:
    """Return the present mode."""
    return _mode


def use_kernels(tensor: Tensor) -> bool:
    """Tell whether operations on ``tensor`` run as CUDA kernels.

    Raises RuntimeError in mode "cupy" if it is a CUDA tensor and CuPy cannot be used.
    """
    if _mode == "torch" or not tensor.is_cuda:
        return False
    reason = obstacle() or trial(tensor.get_device())
    if reason and _mode == "cupy":
        raise RuntimeError(f"kernel mode 'cupy' needs CUDA kernels, but {reason}")
    if reason:
        _warn_once(reason)
    return not reason


@functools.cache
def obstacle() -> str:
    """Say why CuPy's kernels cannot be used with this torch; an empty text if they can."""
    if torch.version.cuda is None:
        return "this PyTorch build has no CUDA support"
    extra = "cuda13" if int(torch.version.cuda.split(".")[0]) >= 13 else "cuda12"
    try:
        cupy().cuda.nvrtc.getVersion()  # a package of its own, loaded on first use
    except Exception as error:
        return f"CuPy does not work ({error}): pip install 'zlaunch[{extra}]'"
    return ""


_TRIAL = 'extern "C" __global__ void trial(float* out) { *out = 42.0f; }'


@functools.cache
def trial(device_index: int) -> str:
    """Compile and launch one small kernel; return why that cannot be done on this device, or nothing.

    A compiler, a driver or a cache folder that is no good is found here and not in the first step.
    """
    try:
        out = torch.zeros((), device=torch.device("cuda", device_index))
        with _stream_of(out.device):
            function = cupy().RawModule(code=_TRIAL, options=OPTIONS, backend="nvrtc").get_function("trial")
            function((1,), (1,), (argument(out),))
        found = float(out)
    except Exception as error:
        return f"a test kernel failed on cuda:{device_index} ({type(error).__name__}: {error})"
    return "" if found == 42.0 else f"a test kernel on cuda:{device_index} returned {found} instead of 42"


@contextmanager
def _stream_of(device: torch.device) -> Iterator[int]:
    """Let CuPy launch on torch's current stream of a device, whose number this gives."""
    stream = torch.cuda.current_stream(device)
    with cupy().cuda.Device(stream.device_index), _external(stream.cuda_stream, stream.device_index):
        yield stream.device_index


@functools.cache
def _external(pointer: int, device_index: int) -> Any:
    """Return CuPy's object for a stream of torch's: streams are few, and live as long as the process."""
    return cupy().cuda.ExternalStream(pointer, device_index)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"zlaunch uses torch operations instead of its CUDA kernels: {reason}", stacklevel=4)


def cupy() -> Any:
    """Import the module on first use; it has no types."""
    import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return cupy


_PARTS = {"step": ("rules",), "narrow": ("rules",)}
"""Lists, for some kernel files, what stands between ``common.cu`` and them."""


def source(name: str) -> str:
    """Return the complete CUDA C++ of a kernel file."""
    folder = files("zlaunch.cuda_ops") / "kernels"
    return "".join((folder / f"{part}.cu").read_text() for part in ("common", *_PARTS.get(name, ()), name))


def define(name: str, dtype: torch.dtype | None) -> str:
    """Return the compiler option that makes ``name`` the storage type of ``dtype``; None for no tensor at
    all.
    """
    return f"-D{name}={'NONE' if dtype is None else _SUFFIX[dtype]}"


@functools.cache
def _module(name: str, defines: tuple[str, ...]) -> Any:
    return cupy().RawModule(code=source(name), options=(*OPTIONS, *defines), backend="nvrtc")


@functools.cache
def _function(name: str, kernel: str, defines: tuple[str, ...], device_index: int) -> Any:
    """Load a kernel for one device: a module is loaded into the current one."""
    return _module(name, defines).get_function(kernel)


def blocks_for(items: int) -> int:
    """Return the number of blocks of ``THREADS`` threads for so many items, one a thread."""
    return max(1, min(-(-items // THREADS), MAX_BLOCKS))


def vector_blocks(tensor: Tensor) -> int:
    """Return the number of blocks for a kernel that takes the elements of ``tensor`` in vectors."""
    return blocks_for(-(-tensor.numel() // VECTOR))


def scalar(value: Scalar) -> tuple[Tensor | None, float]:
    """Turn a Scalar into two kernel arguments: the pointer, or the value where that is null."""
    return (value, 0.0) if isinstance(value, Tensor) else (None, float(value))


def argument(value: Tensor | float | None) -> Any:
    """Turn a kernel's argument into the numpy scalar that holds its bytes."""
    if value is None:
        return np.uintp(0)
    if isinstance(value, Tensor):
        return np.uintp(value.data_ptr())
    return np.float32(value) if isinstance(value, float) else np.int64(value)


def launch(
    name: str,
    kernel: str,
    *arguments: Tensor | float | None,
    device: torch.device,
    blocks: int,
    defines: tuple[str, ...] = (),
) -> None:
    """Launch ``kernel`` of file ``name`` on torch's current stream of ``device``; nothing is copied or
    awaited.

    Tensors and None become pointers, floats ``float``, ints ``long long``.
    """
    with _stream_of(device) as index:
        function = _function(name, kernel, defines, index)
        function((blocks,), (THREADS,), tuple(map(argument, arguments)))
