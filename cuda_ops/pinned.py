"""Page-locked host memory, which a GPU reads and writes at full speed and without the host's help.

Locking is slow and the amount is limited, so buffers are kept and lent again. Each starts on a page, as
O_DIRECT transfers want it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Bytes of a pool: what it holds, what of that is page-locked or lent, and the most that was lent."""

    held_bytes: int
    pinned_bytes: int
    lent_bytes: int
    peak_bytes: int


class PinnedPool:
    """Lends page-aligned uint8 tensors of host memory, page-locked where ``pin`` asks for it and a GPU is
    there.

    ``budget_bytes`` limits what is page-locked; beyond it, or where the system refuses, memory is pageable
    and one warning says so (copies then take longer and the host waits for them).
    """

    def __init__(self, *, pin: bool, budget_bytes: int | None = None) -> None:
        self._pin = pin and torch.cuda.is_available()
        self._budget = budget_bytes
        self._free: list[Tensor] = []
        self._made: dict[int, Tensor] = {}
        """Every buffer by its address. The driver must hear of it before locked memory is unmapped, so none
        goes without the pool.
        """
        self._pinned: set[int] = set()
        self._warned = False
        self._held = self._locked = self._lent = self._peak = 0
        self._lock = threading.Lock()
        # the driver must not think that memory is locked which the system has given to somebody else
        finalize(self, _unlock, self._pinned).atexit = False

    def take(self, nbytes: int) -> Tensor:
        """Lend a buffer of at least ``nbytes`` bytes (rounded up to whole pages), content undefined.

        The smallest free one that is large enough and at most twice as large, or a new one.
        """
        nbytes = max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        with self._lock:
            fitting = [t for t in self._free if nbytes <= t.numel() <= 2 * nbytes]
            if fitting:
                buffer = min(fitting, key=Tensor.numel)
                self._free = [t for t in self._free if t is not buffer]
            else:
                buffer = self._new(nbytes)
            self._lent += buffer.numel()
            self._peak = max(self._peak, self._lent)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer; nobody may read or write it any more, copies under way included."""
        with self._lock:
            self._lent -= buffer.numel()
            self._free.append(buffer)

    def statistics(self) -> PoolStatistics:
        """Tell how much memory there is and was."""
        return PoolStatistics(self._held, self._locked, self._lent, self._peak)

    def drop(self, buffer: Tensor) -> None:
        """Take back a lent buffer for good: it is no longer page-locked, and its memory goes with the last
        tensor over it.
        """
        with self._lock:
            self._lent -= buffer.numel()
            self._forget(buffer)

    def trim(self) -> None:
        """Give the free buffers back to the system."""
        with self._lock:
            for buffer in self._free:
                self._forget(buffer)
            self._free.clear()

    def close(self) -> None:
        """Unlock everything, lent buffers too; the pool is empty afterwards."""
        with self._lock:
            for buffer in list(self._made.values()):
                self._forget(buffer)
            self._free.clear()
            self._lent = 0

    def _forget(self, buffer: Tensor) -> None:
        address = buffer.data_ptr()
        del self._made[address]
        self._held -= buffer.numel()
        if address in self._pinned:
            self._pinned.discard(address)
            self._locked -= buffer.numel()
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def _new(self, nbytes: int) -> Tensor:
        # private: shared memory gets no huge pages
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        if self._pin and hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)  # a fork would have the device write to pages that are copied
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._made[buffer.data_ptr()] = buffer
        self._held += nbytes
        if self._pin:
            self._page_lock(buffer)
        return buffer

    def _page_lock(self, buffer: Tensor) -> None:
        problem = None
        if self._budget is not None and self._locked + buffer.numel() > self._budget:
            problem = f"the budget of {self._budget / 2**30:.1f} GiB is used up"
        else:
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[no-untyped-call]
            if int(status) != 0:
                _clear_cuda_error()
                problem = f"the driver refused (CUDA error {int(status)})"
        if problem is None:
            self._pinned.add(buffer.data_ptr())
            self._locked += buffer.numel()
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"cannot page-lock all host memory for offload: {problem}. The rest is pageable and "
                "transfers more slowly. To need less, lower sub_group_size or buffer_count",
                RuntimeWarning,
                stacklevel=3,
            )


def _unlock(addresses: set[int]) -> None:
    """Unlock what a pool that nobody has closed still had; nothing is copied to it or from it afterwards."""
    if not addresses:
        return
    with suppress(RuntimeError):  # of a device that has failed
        torch.cuda.synchronize()
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _clear_cuda_error() -> None:
    """Forget the refusal, or torch reports it at the next kernel as if that had failed."""
    try:
        ctypes.CDLL(None).cudaGetLastError()
    except (OSError, AttributeError):
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            return
