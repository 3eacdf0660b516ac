"""Everything that needs a GPU, in one command: the gpu tests, the kernels, training at world size 1, offload,
checkpoints.

    python -m benchmarks.gpu [--out benchmarks/results/NAME.json]

Needs no launcher (nor its dependencies) and stays under ten minutes. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out")
    args = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: this machine has no CUDA device")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu"], cwd=ROOT, env=env, timeout=150
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = ["--systems=compute,stage 0,stage 1,stage 2,stage 3", "--model=100m", "--micro_batch=16"]
        options += ["--rounds=5", "--steps=10", f"--out={out}"]
        command = [sys.executable, "-m", "benchmarks.train_worker", *options]
        subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=90)
        measured = json.loads(out.read_text())
    command = [sys.executable, "-m", "benchmarks.kernels"]
    kernels = subprocess.run(command, cwd=ROOT, env=env, timeout=45, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, "-m", "benchmarks.large", "--largest", "5000m", "--limit_s", "28"]
    large = subprocess.run(command, cwd=ROOT, env=env, timeout=200, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.checkpoint", "--path", folder, "--rounds", "3"]
        saving = subprocess.run(command, cwd=ROOT, env=env, timeout=50, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "checks.json"
        command = [sys.executable, "-m", "benchmarks.checks", "--rounds", "3", "--out", str(out)]
        subprocess.run(command, cwd=ROOT, env=env, timeout=30)
        checks = json.loads(out.read_text()) if out.exists() else "failed"
    device = torch.cuda.get_device_properties(0)
    result = {
        "gpu": device.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "tests": "passed" if tests.returncode == 0 else f"pytest exit {tests.returncode}",
        "train_100m_fp32_world_1": measured,
        "kernels_128m": json.loads(kernels.stdout) if kernels.returncode == 0 else "failed, CuPy missing?",
        "checkpoint_64m": json.loads(saving.stdout) if saving.returncode == 0 else "failed",
        "checks_of_a_step_100_layers": checks,
        "gpt2_1500m_bf16_offload_under_24_gb": json.loads(large.stdout) if large.stdout else "failed",
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")
    sys.exit(1 if tests.returncode else 0)


if __name__ == "__main__":
    main()
