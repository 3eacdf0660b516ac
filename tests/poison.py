"""Fill memory that the runtime allocates without values, so that a forgotten zero shows every time.

Note [Poisoned memory]
``torch.empty`` usually returns fresh pages, which are zero: a test passes although the runtime reads what it
never wrote. Under ``poison()`` such memory holds NaN (the largest number for integers). Only calls from
``zlaunch`` are changed: torch and the test's own models allocate as ever, which keeps the cost at nothing and
compilers undisturbed. ``torch.utils.deterministic.fill_uninitialized_memory`` is no choice: it works only
under ``use_deterministic_algorithms``, which selects other kernels, and it leaves out resized storages and
the ranks' shared memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_INHERITED = object()
Change = tuple[Any, str, Any]
"""An object, the name of an attribute, and what it was, or that it was inherited."""


def fill(tensor: Tensor) -> None:
    """Fill a tensor on the CPU with NaN, or with the largest integer."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_from_runtime() -> bool:
    """Tell whether the caller of a patched function is the runtime."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("zlaunch.")


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def allocate_filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if not torch.compiler.is_compiling() and _is_from_runtime():
            fill(tensor)
        return tensor

    return allocate_filled


def _resized(resize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resize)
    def resize_filled(self: torch.UntypedStorage, nbytes: int) -> Any:
        before = self.nbytes()
        result = resize(self, nbytes)
        if nbytes > before and self.device.type == "cpu" and _is_from_runtime():
            # bytes of ones are NaN in every floating dtype
            torch.empty(0, dtype=torch.uint8).set_(self)[before:].fill_(255)
        return result

    return resize_filled


def poison() -> list[Change]:
    """Poison what the runtime allocates in this process from now on; return what was changed."""
    from torch.utils._device import _device_constructors

    from zlaunch.runtime.comm.shared_memory import SharedMemory
    from zlaunch.runtime.offload.transfer import HostLink

    _device_constructors()  # its cache has to hold torch's functions
    changes: list[Change] = []
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (SharedMemory, "empty"),
        (HostLink, "empty"),
        (HostLink, "take"),
        (torch.UntypedStorage, "resize_"),
    ):
        former = getattr(owner, name)
        changes.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, _resized(former) if name == "resize_" else _filled(former))
    return changes


@contextmanager
def poisoned() -> Iterator[None]:
    """Poison memory inside the context."""
    changes = poison()
    try:
        yield
    finally:
        for owner, name, former in changes:
            if former is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, former)
