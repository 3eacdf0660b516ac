"""Measure saving and loading beside torch.save, torch's distributed checkpoint (DCP) and the raw disk.

    python -m benchmarks.checkpoint --path FOLDER [--numel N] [--ranks 1] [--rounds 5] [--out FILE.json]

All systems save the same state (fp32 master values and AdamW's two moments, sharded over the ranks) to the
same folder. They take turns in rotating order, because a shared disk is faster after a pause. The clock stops
after fsync. As root, the benchmark drops the page cache before each load.

- Disk: fio, sequential, direct, io_uring, 1 MiB blocks, queue depth 8, the same number of bytes, a new file.
- Stall: the time that training waits for a background save. It is compared with one copy of the state into
  allocated host memory, the mean of one copy before and one after.
- Ratios: medians over the rounds of the ratios within a round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.offload import fio, memory_bytes
from tests.ports import reserved_port


def _cold() -> bool:
    """Forget what files are in memory; whether that was allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def _extra(action: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and bytes of memory that the process grew by meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return seconds, max(0, memory_bytes("VmHWM") - before)


def worker(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    import zlaunch

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # its functions are not exported
    zlaunch.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width = 1024
    count = max(1, args.numel // width**2)

    def engine_of(asynchronous: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        config = {
            "train_batch_size": ranks,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 2},
            "checkpoint": {"asynchronous": asynchronous},
        }
        engine, *_ = zlaunch.initialize(model=model, config=config)
        engine.backward(engine(torch.randn(1, width, device=engine.device)).square().mean())
        engine.step()
        return engine

    engine = engine_of(False)
    background = engine_of(True)
    state: dict[str, torch.Tensor] = {}
    for index, unit in enumerate(engine.units):
        state[f"{rank}.{index}.master"] = unit.store.master.detach()
    for index, entry in enumerate(engine._shard_step.optimizer.state.values()):
        state |= {f"{rank}.{index}.{key}": entry[key] for key in ("exp_avg", "exp_avg_sq")}
    own_bytes = sum(t.numel() * t.element_size() for t in state.values())
    total = torch.tensor([own_bytes], dtype=torch.float64)
    dist.all_reduce(total)
    on_gpu = any(value.is_cuda for value in state.values())
    copies = {key: torch.zeros_like(value, device="cpu", pin_memory=on_gpu) for key, value in state.items()}
    times: dict[str, list[float]] = {}
    extra: dict[str, int] = {}
    cold = True

    def timed(name: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        seconds, grown = _extra(action)
        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.setdefault(name, []).append(float(slowest))
        extra[name] = max(extra.get(name, 0), grown)

    def copy() -> None:
        for key, value in state.items():
            copies[key].copy_(value, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    def torch_save(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / f"{rank}.pt")
        fd = os.open(folder / f"{rank}.pt", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    pending: list[Any] = []
    folder = Path(args.path)
    names = {name: folder / name for name in ("ours", "torch", "dcp", "ours async", "dcp async")}
    for round_ in range(args.rounds + 1):
        for path in names.values():
            if rank == 0:  # a run's folder is there from its second save on
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
        dist.barrier()

        def disk(kind: str) -> None:
            if rank == 0 and (speed := fio(folder, int(total), kind)) is not None:
                times.setdefault(f"disk {kind}", []).append(float(total) / speed)

        (folder / "fio.bin").unlink(missing_ok=True)
        saves = [
            lambda: disk("write"),
            lambda: timed("save ours", lambda: engine.save_checkpoint(names["ours"])),
            lambda: timed("save torch.save", lambda: torch_save(names["torch"])),
            lambda: timed("save DCP", lambda: dcp.save(state, checkpoint_id=names["dcp"])),
        ]
        random.Random(round_).shuffle(saves)  # a rotation would keep who comes after whom
        for save in saves:
            save()
            dist.barrier()
        disk("read")
        os.sync()
        timed("copy in memory", copy)
        timed("stall ours", lambda: background.save_checkpoint(names["ours async"]))
        timed("rest ours", background.wait_for_checkpoint)
        os.sync()
        timed("copy in memory", copy)
        after = times["copy in memory"].pop()
        times["copy in memory"][-1] = (times["copy in memory"][-1] + after) / 2
        pending.clear()
        timed("stall DCP", lambda: pending.append(dcp.async_save(state, checkpoint_id=names["dcp async"])))
        timed("rest DCP", lambda: [future.result() for future in pending])
        for name, load in (
            ("load ours", lambda: engine.load_checkpoint(names["ours"])),
            ("load torch.load", lambda: torch.load(names["torch"] / f"{rank}.pt", weights_only=True)),
            ("load DCP", lambda: dcp.load(dict(copies), checkpoint_id=names["dcp"])),
        ):
            dist.barrier()
            cold = (rank != 0 or _cold()) and cold
            timed(name, load)
        if round_ == 0:  # the first has page faults and imports of everybody
            times.clear()
            extra.clear()
    snapshot = background.checkpoints._background._snapshot
    extra["snapshot, kept between saves"] = snapshot.held_bytes if snapshot is not None else 0
    return {"bytes": float(total), "own_bytes": own_bytes, "times": times, "extra": extra, "cold": cold}


def run_ranks(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with reserved_port() as port:
        return _run_ranks(args, folder, port)


def _run_ranks(args: argparse.Namespace, folder: Path, port: int) -> dict[str, Any]:
    jobs = []
    for rank in range(args.ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(args.ranks),
            "LOCAL_WORLD_SIZE": str(args.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.ranks)),
        }
        command = [sys.executable, "-m", "benchmarks.checkpoint", "--worker", "--path", str(folder)]
        command += ["--numel", str(args.numel), "--rounds", str(args.rounds)]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        jobs.append(subprocess.Popen(command, env=env, stdout=out, text=True))
    text = jobs[0].communicate()[0]
    if any(job.wait() for job in jobs):
        raise SystemExit("a worker failed")
    return dict(json.loads(text.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--numel", type=int, default=64_000_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args)))
        return
    with tempfile.TemporaryDirectory(dir=args.path) as name:
        found = run_ranks(args, Path(name))
    times = found["times"]

    def over(left: str, right: str) -> float | None:
        if left not in times or right not in times:
            return None
        return round(statistics.median(a / b for a, b in zip(times[left], times[right], strict=True)), 3)

    result = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "ranks": args.ranks,
        "state, MB": round(found["bytes"] / 1e6),
        "rounds": args.rounds,
        "page cache dropped before loads": found["cold"],
        "GB/s": {
            name: round(found["bytes"] / statistics.median(values) / 1e9, 3)
            for name, values in times.items()
            if name.split()[0] in ("save", "load", "disk", "copy", "stall")
        },
        "save, of the disk's speed": over("disk write", "save ours"),
        "torch.save, of the disk's speed": over("disk write", "save torch.save"),
        "DCP save, of the disk's speed": over("disk write", "save DCP"),
        "load, of the disk's speed": over("disk read", "load ours"),
        "torch.load, of the disk's speed": over("disk read", "load torch.load"),
        "DCP load, of the disk's speed": over("disk read", "load DCP"),
        "stall over one copy": over("stall ours", "copy in memory"),
        "DCP's stall over one copy": over("stall DCP", "copy in memory"),
        "extra memory of a rank over its state": {
            name: round(value / found["own_bytes"], 3)
            for name, value in found["extra"].items()
            if not name.startswith("copy")
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
