"""Find the slots of this machine, without torch and without touching a GPU.

Slot i is the i-th device that CUDA would show to a process started here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_UUID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class Devices:
    """Holds the visible devices as CUDA_VISIBLE_DEVICES tokens; none of them means CPU workers."""

    tokens: tuple[str, ...]
    visible: str | None
    """CUDA_VISIBLE_DEVICES as it was given from outside, for messages."""

    def describe(self) -> str:
        """Say how many devices there are, and what hides the others if something does."""
        count = len(self.tokens)
        text = f"{count} GPU{'' if count == 1 else 's'}"
        return text if self.visible is None else f"{text} (CUDA_VISIBLE_DEVICES={self.visible})"


def discover(
    environ: Mapping[str, str],
    *,
    proc: Path = Path("/proc/driver/nvidia/gpus"),
    dev: Path = Path("/dev"),
    wsl: Path = Path("/usr/lib/wsl/lib"),
) -> Devices:
    """Count the GPUs of this machine and apply CUDA_VISIBLE_DEVICES by CUDA's own rules."""
    # Device files may not exist before the first use, and a container may see the host's /proc: the smaller
    # count that is not zero is the one a process here can open.
    counts = (
        sum(1 for _ in proc.iterdir()) if proc.is_dir() else 0,
        sum(1 for _ in dev.glob("nvidia[0-9]*")),
    )
    physical = min((count for count in counts if count), default=0)
    if not physical and (dev / "dxg").exists() and (wsl / "libcuda.so.1").exists():
        physical = _count_by_driver(wsl / "nvidia-smi")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return Devices(tuple(map(str, range(physical))), None)
    return Devices(_visible_tokens(visible, physical), visible)


def _count_by_driver(program: Path) -> int:
    """Ask nvidia-smi for the number of GPUs, one if it cannot say: WSL 2 has one device file for all."""
    try:
        said = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return 1
    return max(1, sum(line.startswith("GPU ") for line in said.splitlines()))


def _visible_tokens(text: str, physical: int) -> tuple[str, ...]:
    """Return the tokens that CUDA would accept: a bad one ends the list, a repeated one empties it."""
    tokens: list[str] = []
    for token in (piece.strip() for piece in text.split(",")):
        by_index = token.isascii() and token.isdigit() and int(token) < physical
        if not by_index and not (physical and token.startswith(_UUID_PREFIXES)):
            break
        token = str(int(token)) if by_index else token
        if token in tokens:
            return ()
        tokens.append(token)
    return tuple(tokens)


def visible_for_workers(tokens: Sequence[str], *, alone: bool = False) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each worker.

    All workers of a node see one list, so that `cuda:LOCAL_RANK` is right and peers can map each other's
    memory. CUDA opens only one MIG instance in a process, so with MIG each worker sees its instance alone;
    with `alone` always.
    """
    if alone or any(token.startswith("MIG-") for token in tokens):
        return tuple(tokens)
    return (",".join(tokens),) * len(tokens)


def split_cores(cores: Sequence[int], workers: int) -> tuple[tuple[int, ...], ...]:
    """Share the cores out equally, neighbours together; with fewer cores than workers they share."""
    share = max(1, len(cores) // workers)
    return tuple(
        tuple(cores[(i * share) % len(cores) : (i * share) % len(cores) + share]) for i in range(workers)
    )
