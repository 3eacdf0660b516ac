"""Run zlaunch's CUDA kernels under compute-sanitizer: memory, uninitialized reads, shared memory, barriers.

    python -m benchmarks.sanitizer [--tools memcheck,racecheck] [--plain]

Prints the number of errors of each tool. compute-sanitizer is searched on PATH, in CUDA's folder and in the
wheel nvidia-cuda-sanitizer-api. `--plain` makes the same calls without it, also on a CPU. The exit code is 1
after errors, or if the program is missing.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
SIZES = (1, 301, 2051)
"""Elements; the tools make kernels slower by a factor of ten to a hundred."""
_LIMIT_S = 100


def find() -> str | None:
    """Find compute-sanitizer."""
    on_path = shutil.which("compute-sanitizer")
    wheels = (str(Path(folder, "nvidia", "*", "bin")) for folder in sys.path if folder)
    folders = itertools.chain(("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer"), wheels)
    found = itertools.chain.from_iterable(glob.glob(f"{folder}/compute-sanitizer") for folder in folders)
    return on_path or next((path for path in sorted(found) if Path(path).is_file()), None)


def calls(device: str) -> int:
    """Call each kernel in each of its variants on small tensors; return how many comparisons were made."""
    from tests.unit.cuda_ops import test_kernels_math as math
    from tests.unit.cuda_ops.test_quantize import compare_quantize
    from tests.unit.cuda_ops.test_signs import compare_signs
    from zlaunch.cuda_ops import loader

    loader.set_mode("torch" if device == "cpu" else "cupy")
    made = 0
    for numel, grad, out in itertools.product(SIZES, math.FLOATS, math.OUTS):
        for compare in (math.compare_adam, math.compare_sgd, math.compare_lion):
            compare(device, grad, out, numel)
            made += 1
    for numel, dtype in itertools.product(SIZES, math.FLOATS):
        math.compare_norm(device, dtype, numel)
        math.compare_norm(device, dtype, numel, 1)
        made += 2
    for dtype, bits, offset in itertools.product(math.FLOATS, (8, 4), (0, 3)):
        compare_quantize(device, dtype, bits, 96, 2051, offset=offset)
        made += 1
    compare_signs(device, 20 * 256)
    compare_signs(device, 16 * 256, offset=3)
    math.compare_norms(device, SIZES)
    math.compare_prepare(device)
    math.compare_loss_scale(device, 0)
    return made + 5


def under(program: str, tool: str) -> dict[str, object]:
    """Run the calls under one tool, and return what it has found."""
    os.chmod(program, 0o755)  # wheels do not always keep it
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        __spec__.name,
        "--plain",
    ]
    # each tensor is an allocation of its own, or a read behind one would meet the next
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {_LIMIT_S} s"}
    said = run.stdout + run.stderr
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", said)
    if summary is None or (run.returncode and not int(summary[1])):
        return {"failed": run.returncode, "said": said[-1500:]}
    errors = int(summary[1])
    return {"errors": errors, **({"said": said[-1500:]} if errors else {})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.plain:
        import torch

        print(json.dumps({"comparisons": calls("cuda" if torch.cuda.is_available() else "cpu")}))
        return 0
    program = find()
    if program is None:
        print("compute-sanitizer not found: install the wheel nvidia-cuda-sanitizer-api==13.0.85 (14 MB)")
        return 1
    found = {tool: under(program, tool) for tool in options.tools.split(",")}
    print(json.dumps(found))
    return int(any(result.get("errors") != 0 for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
