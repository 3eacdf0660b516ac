"""Find the largest model that trains on one GPU, from an estimate downwards, until one completes two steps.

    python -m benchmarks.largest [--system "stage 2"] [--cap_gb 24] [--rehearse]

Each size runs in its own process (`benchmarks.large`), which may run out of memory. The best size so far is
printed after each run. Activations are recomputed; the context is 1024, the width 2560.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

BYTES_OF_A_PARAMETER = {"stage 2": 16, "offload both": 16}
"""Master and two moments in fp32, value and gradient in bf16; on the GPU, or in host memory."""
_LEFT_GB = 2.0
"""For activations and the libraries."""
_OF_A_LAYER = 12 * 2560**2
_LIMIT_S = 100


def room_gb(system: str, cap_gb: float) -> float:
    """Return the memory that bounds the model, in GiB."""
    import torch

    from zlaunch.runtime.host_memory import host_bytes

    if system == "offload both" or not torch.cuda.is_available():
        return host_bytes() / 2**30 * 0.9
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    return min(total, cap_gb or total)


def attempt(system: str, cap_gb: float, layers: int, *, rehearse: bool) -> dict[str, Any]:
    """Train two steps of a model of so many layers, and return what that took, or how it ended."""
    size = ["--model", "15m"] if rehearse else ["--model", "5000m", "--layers", str(layers)]
    more = ["--cap_gb", str(cap_gb), "--steps", "2", "--micro_batch", "1", "--checkpoint"]
    command = [sys.executable, "-m", "benchmarks.large", "--system", system, *size, *more]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"layers": layers, "failed": f"more than {_LIMIT_S} s"}
    if run.returncode:
        return {"layers": layers, "failed": (run.stderr.strip().splitlines() or ["no word"])[-1][-300:]}
    return {"layers": layers, **json.loads(run.stdout.strip().splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", choices=BYTES_OF_A_PARAMETER, default="stage 2")
    parser.add_argument("--cap_gb", type=float, default=0.0)
    parser.add_argument("--rehearse", action="store_true", help="run once with a small model")
    args = parser.parse_args()
    room = (room_gb(args.system, args.cap_gb) - _LEFT_GB) * 2**30
    most = max(1, int(room / BYTES_OF_A_PARAMETER[args.system] / _OF_A_LAYER))
    tries: list[dict[str, Any]] = []
    for part in (1.0, 0.93, 0.86, 0.8, 0.7, 0.5):
        found = attempt(args.system, args.cap_gb, max(1, int(most * part)), rehearse=args.rehearse)
        tries.append(found)
        print(json.dumps({"tries": tries}), flush=True)
        if "failed" not in found:
            print(json.dumps({**found, "room_gb": round(room / 2**30, 1), "tries": tries}))
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
