"""Measure NVMe offload against the disk's speed, and its memory.

    python -m benchmarks.offload --path FOLDER [--layers 240] [--rounds 5] [--out FILE.json]

One run measures, in turns:

- reads and writes of the disk engine beside fio (io_uring, same block size and depth)
- a training step with all optimizer state and parameters on disk (stage 3, one rank)
- its two lower bounds: the same step with everything in host memory, and reading and writing the same records
  without arithmetic

Memory is the growth of the process since before the model was built.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK_BYTES, DEPTH = 1 << 20, 8


def fio(folder: Path, nbytes: int, kind: str) -> float | None:
    """Bytes per second, or None without fio."""
    if shutil.which("fio") is None:
        return None
    job = ["fio", "--name=x", f"--rw={kind}", f"--filename={folder}/fio.bin", f"--size={nbytes}"]
    job += [f"--bs={BLOCK_BYTES}", f"--iodepth={DEPTH}", "--ioengine=io_uring", "--direct=1"]
    job += ["--output-format=json", "--end_fsync=1"]
    report = json.loads(subprocess.run(job, capture_output=True, text=True, check=True).stdout)
    return float(report["jobs"][0][kind]["bw_bytes"])


def disk(folder: Path, nbytes: int, rounds: int) -> dict[str, Any]:
    from zlaunch.runtime.offload.disk import DiskEngine, ScratchFile, aligned_buffer

    engine = DiskEngine(block_bytes=BLOCK_BYTES, threads=DEPTH)
    file = ScratchFile(folder / "engine.bin")
    file.reserve(nbytes)
    buffer = aligned_buffer(nbytes)
    for start in range(0, nbytes, 4096):
        buffer[start : start + 8] = start.to_bytes(8, "little")
    found: dict[str, list[float]] = {"write": [], "read": [], "fio write": [], "fio read": []}
    for _ in range(rounds):
        for kind in ("write", "read"):
            if (peer := fio(folder, nbytes, kind)) is not None:
                found[f"fio {kind}"].append(peer)
            started = time.perf_counter()
            (engine.write if kind == "write" else engine.read)(file, buffer).wait()
            if kind == "write":
                os.fdatasync(file.fd)
            found[kind].append(nbytes / (time.perf_counter() - started))
    engine.close()
    file.close()
    medians = {name: statistics.median(values) for name, values in found.items() if values}
    result: dict[str, Any] = {f"{name} GB/s": round(value / 1e9, 3) for name, value in medians.items()}
    for kind in ("read", "write"):
        if found[f"fio {kind}"]:
            pairs = zip(found[kind], found[f"fio {kind}"], strict=True)
            result[f"{kind} over fio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return result


def memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def model(layers: int, width: int) -> Any:
    from torch import nn

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + 0.01 * layer(x)
            return x.square().mean()

    return Stack()


def io_only(engine: Any) -> float:
    """Seconds to read and write back every record of the step, with the step's own buffers."""
    from zlaunch.runtime.zero.store import Access, open_tiles

    stores = [unit.store for unit in engine.units if unit.store is not None]
    started = time.perf_counter()
    with open_tiles([(store, tile, None) for store in stores for tile in store.tiles], Access.WRITE) as tiles:
        for _ in tiles:
            pass
    return time.perf_counter() - started


def train(args: argparse.Namespace) -> dict[str, Any]:
    """One process: seconds of forward and backward, of the step, bytes moved by it, and memory."""
    import torch

    import zlaunch

    torch.manual_seed(0)
    zlaunch.init_distributed()
    place = {"device": args.device, "nvme_path": args.path}
    zero = {"stage": 3, "sub_group_size": args.tile, "offload_optimizer": {**place, "buffer_count": 4}}
    zero["offload_param"] = {**place, "max_in_cpu": 0}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    config: dict[str, Any] = {
        "train_batch_size": 1,
        "optimizer": optimizer,
        "zero_optimization": zero,
        "aio": {"block_size": BLOCK_BYTES, "queue_depth": DEPTH},
        "gradient_clipping": 1.0,
    }
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    with zlaunch.zero.Init(config=config):
        stack = model(args.layers, args.width)
    engine, *_ = zlaunch.initialize(model=stack, config=config)
    x = torch.randn(1, args.width)
    passes: list[float] = []
    steps: list[float] = []
    copies: list[float] = []
    offload = engine._offload
    assert offload is not None
    disk_engine = offload.engine
    moved = 0, 0
    for _ in range(args.rounds + 1):
        started = time.perf_counter()
        engine.backward(engine(x))
        passes.append(time.perf_counter() - started)
        reads, writes = (disk_engine.read_bytes, disk_engine.written_bytes) if disk_engine else (0, 0)
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
        if disk_engine:
            moved = disk_engine.read_bytes - reads, disk_engine.written_bytes - writes
            copies.append(io_only(engine))
    peak = memory_bytes("VmHWM") - before
    numel = args.layers * args.width**2
    ring = 4 * offload.ring.nbytes if args.device == "nvme" else 0
    engine.destroy()
    return {
        "numel": numel,
        "pass_s": statistics.median(passes[1:] or passes),
        "step_s": statistics.median(steps[1:] or steps),
        "io_s": statistics.median(copies[1:] or copies) if copies else 0.0,
        "over_io": statistics.median(
            a / b for a, b in zip(steps[1:] or steps, copies[1:] or copies, strict=True)
        )
        if copies
        else 0.0,
        "step_read_bytes": moved[0],
        "step_written_bytes": moved[1],
        "peak_bytes": peak,
        "buffers_bytes": ring,
    }


def in_process(args: argparse.Namespace, device: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.offload", "--worker", "--device", device]
    command += ["--path", str(folder), "--layers", str(args.layers), "--width", str(args.width)]
    command += ["--tile", str(args.tile), "--rounds", str(args.rounds)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--layers", type=int, default=240)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tile", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="nvme")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(train(args)))
        return
    with tempfile.TemporaryDirectory(dir=args.path) as name:
        folder = Path(name)
        first = disk(folder, 1 << 30, args.rounds)
        nvme = in_process(args, "nvme", folder)
        memory = in_process(args, "cpu", folder)
        last = disk(folder, 1 << 30, args.rounds)
    state = 12 * nvme["numel"]
    result = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "disk before": first,
        "disk after": last,
        "parameters": nvme["numel"],
        "step with everything on disk, s": round(nvme["step_s"], 3),
        "reading and writing the same records alone, s": round(nvme["io_s"], 3),
        "the same step in host memory, s": round(memory["step_s"], 3),
        "step over the larger of the two": round(min(nvme["over_io"], nvme["step_s"] / memory["step_s"]), 3),
        "bytes of a step, MB": [round(nvme[f"step_{way}_bytes"] / 1e6) for way in ("read", "written")],
        "forward and backward, s": round(nvme["pass_s"], 3),
        "optimizer state, MB": round(state / 1e6),
        "peak memory, MB": round(nvme["peak_bytes"] / 1e6),
        "buffers, MB": round(nvme["buffers_bytes"] / 1e6),
        "peak without the buffers, MB": round((nvme["peak_bytes"] - nvme["buffers_bytes"]) / 1e6),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
