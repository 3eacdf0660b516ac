"""How fast a disk is with our own way of using it, and what that means for a training step."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DiskError
from .disk import DiskEngine, ScratchFile, aligned, aligned_buffer

BLOCKS_BYTES = (256 << 10, 1 << 20, 4 << 20)
THREADS = (1, 2, 4, 8)
STATE_BYTES_PER_PARAMETER = 12
"""fp32 master weight and Adam's two moments: read and written once a step."""
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """Bandwidths in bytes per second, medians of a few rounds."""

    block_bytes: int
    threads: int
    read: float
    write: float
    direct: bool
    """Past the page cache; else these are the speeds of memory."""

    @property
    def step(self) -> float:
        """Bytes of state read and written per second when a step does both."""
        return 2 / (1 / self.read + 1 / self.write)

    def aio(self) -> dict[str, object]:
        """The config's ``aio`` block for it."""
        return {
            "block_size": self.block_bytes,
            "queue_depth": self.threads,
            "intra_op_parallelism": self.threads,
            "single_submit": False,
            "overlap_events": True,
        }

    def step_s(self, parameters: float, world_size: int) -> float:
        """Seconds a step spends on the optimizer state of a model, on each of ``world_size`` ranks with a
        disk of their own.
        """
        nbytes = parameters * STATE_BYTES_PER_PARAMETER / world_size
        return nbytes / self.read + nbytes / self.write


def measure(folder: str | os.PathLike[str], nbytes: int) -> Iterator[Speed]:
    """The speed for each block size and number of threads.

    A file of ``nbytes`` is written and read in ``folder`` and removed. Raises DiskError.
    """
    nbytes = aligned(nbytes)
    path = Path(folder) / f".zlaunch-bench-{os.getpid()}"
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise DiskError(28, f"{folder}: {nbytes / 2**30:.2f} GiB asked for, {free / 2**30:.2f} GiB are free")
    file = ScratchFile(path)
    try:
        os.unlink(path)  # gone with the descriptor, whatever happens
        file.reserve(nbytes)
        buffer = aligned_buffer(nbytes)
        for start in range(0, nbytes, 4096):
            buffer[start : start + 8] = start.to_bytes(8, "little")  # no disk gets to compress zeros
        for block_bytes in BLOCKS_BYTES:
            for threads in THREADS:
                yield _measure(file, buffer, block_bytes, threads)
    finally:
        file.close()


def _measure(file: ScratchFile, buffer: memoryview, block_bytes: int, threads: int) -> Speed:
    engine = DiskEngine(block_bytes=block_bytes, threads=threads)
    try:
        times: dict[str, list[float]] = {"read": [], "write": []}
        for _ in range(_ROUNDS):
            for name, move in (("write", engine.write), ("read", engine.read)):
                started = time.perf_counter()
                move(file, buffer).wait()
                if name == "write":
                    os.fdatasync(file.fd)
                times[name].append(time.perf_counter() - started)
    finally:
        engine.close()
    read, write = (len(buffer) / statistics.median(times[name]) for name in ("read", "write"))
    return Speed(block_bytes, threads, read, write, file.direct)
