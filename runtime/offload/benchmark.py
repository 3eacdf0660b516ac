"""Measures how fast a disk is when used as in training, and what that means for a training step."""

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
from .manager import OffloadOptions

BLOCKS_BYTES = (256 << 10, 1 << 20, 4 << 20)
THREADS = (1, 2, 4, 8)
STATE_BYTES_PER_PARAMETER = 12
"""Counts the fp32 master weight and Adam's two moments: read and written once a step."""
_ROUNDS = 3
_PROBE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Speed:
    """Holds bandwidths in bytes per second, medians of a few rounds."""

    block_bytes: int
    threads: int
    read: float
    write: float
    direct: bool
    """Tells whether transfers went past the page cache; else these are the speeds of memory."""

    @property
    def step(self) -> float:
        """Return the bytes of state read and written per second when a step does both."""
        return 2 / (1 / self.read + 1 / self.write)

    def aio(self) -> dict[str, object]:
        """Return the config's ``aio`` block for these settings."""
        return {
            "block_size": self.block_bytes,
            "queue_depth": self.threads,
            "intra_op_parallelism": self.threads,
            "single_submit": False,
            "overlap_events": True,
        }

    def step_s(self, parameters: float, world_size: int) -> float:
        """Return the seconds that a step spends on a model's optimizer state, on each of ``world_size`` ranks
        that have a disk each.
        """
        nbytes = parameters * STATE_BYTES_PER_PARAMETER / world_size
        return nbytes / self.read + nbytes / self.write


def measure(folder: str | os.PathLike[str], nbytes: int) -> Iterator[Speed]:
    """Measure the speed for each block size and number of threads, and yield each.

    A file of ``nbytes`` is written and read in ``folder`` and removed. Raises DiskError.
    """
    nbytes = aligned(nbytes)
    path = Path(folder) / f".zlaunch-bench-{os.getpid()}"
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise DiskError(28, f"{folder}: needs {nbytes / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free")
    file = ScratchFile(path)
    try:
        os.unlink(path)  # removed with the descriptor, whatever happens
        file.reserve(nbytes)
        buffer = aligned_buffer(nbytes)
        for start in range(0, nbytes, 4096):
            buffer[start : start + 8] = start.to_bytes(8, "little")  # no disk gets to compress zeros
        for block_bytes in BLOCKS_BYTES:
            for threads in THREADS:
                yield _measure(file, buffer, block_bytes, threads)
    finally:
        file.close()


def probe(folder: str | os.PathLike[str], options: OffloadOptions) -> Speed:
    """Measure the speed with an offload's settings, shortly: some megabytes, once. Raises DiskError."""
    path = Path(folder) / f".zlaunch-probe-{os.getpid()}"
    file = ScratchFile(path)
    try:
        os.unlink(path)
        file.reserve(_PROBE_BYTES)
        buffer = aligned_buffer(_PROBE_BYTES)
        return _measure(file, buffer, options.block_bytes, options.threads, rounds=1)
    finally:
        file.close()


def _measure(
    file: ScratchFile, buffer: memoryview, block_bytes: int, threads: int, *, rounds: int = _ROUNDS
) -> Speed:
    engine = DiskEngine(block_bytes=block_bytes, threads=threads)
    try:
        times: dict[str, list[float]] = {"read": [], "write": []}
        for _ in range(rounds):
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
