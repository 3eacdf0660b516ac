"""Measure the peaks of one device: matrix products, copies on the device, copies to and from the host.

    python -m benchmarks.device [--size 8192]

Other benchmarks divide by these peaks. On a CPU, it only shows that the benchmark runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], device: torch.device, rounds: int = 10, inner: int = 10) -> float:
    """Median seconds of a call, many at a time, so that the host's part does not count."""
    found = []
    for turn in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(inner):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 2:
            found.append((time.perf_counter() - started) / inner)
    return statistics.median(found)


def measure(size: int) -> dict[str, object]:
    """TFLOP/s of a bf16 product of two square matrices, and GB/s of copies of 256 MiB (1 MiB on a CPU)."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    count = (256 << 20) // 4 if cuda else (1 << 20) // 4
    source, target = (torch.ones(count, device=device) for _ in range(2))
    host = torch.empty(count, pin_memory=cuda)
    nbytes = 4 * count
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "matmul_tflops": round(2 * size**3 / seconds(lambda: torch.mm(a, b), device) / 1e12, 6),
        "copy_gb_per_s": round(2 * nbytes / seconds(lambda: target.copy_(source), device) / 1e9, 1),
        "down_gb_per_s": round(
            nbytes / seconds(lambda: host.copy_(source, non_blocking=True), device) / 1e9, 2
        ),
        "up_gb_per_s": round(
            nbytes / seconds(lambda: source.copy_(host, non_blocking=True), device) / 1e9, 2
        ),
    }
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        result["memory_gb"] = round(properties.total_memory / 1e9, 1)
        result["capability"] = f"{properties.major}.{properties.minor}"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the matrices")
    print(json.dumps(measure(parser.parse_args().size)))


if __name__ == "__main__":
    main()
