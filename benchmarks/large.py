"""Large models on one device: tokens per second of every stage beside plain torch, and of offload.

Part of ``benchmarks.gpu``; on a CPU it runs with a small model, to try it out.

    python -m benchmarks.large [--model 1500m] [--steps 5] [--cap_gb 24] [--nvme FOLDER] [--largest 5000m]

Each system runs in a process of its own. ``offload`` runs under a cap of GPU memory. Its bounds are measured
in the same run: the step with everything on the GPU, gradients down and parameters up over PCIe, and the
optimizer step on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

SIZES = {
    "15m": (8, 384, 6, 128),
    "1500m": (48, 1600, 25, 1024),
    "3000m": (40, 2560, 32, 1024),
    "5000m": (64, 2560, 32, 1024),
}
ADAMW = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
CPU = {"device": "cpu"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "torch": {},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "offload optimizer": {"stage": 2, "offload_optimizer": CPU},
    "offload both": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and a call that makes one step on a batch of tokens."""
    import torch

    import zlaunch
    from examples.gpt import GPT, Size, loss_of

    layers, width, heads, context = SIZES[args.model]
    size = Size(layers=layers, width=width, heads=heads, context=context)
    torch.manual_seed(0)
    device = zlaunch.init_distributed()
    if args.system == "torch":
        with device:  # random numbers for a billion weights take a GPU no time
            model = GPT(size).to(torch.bfloat16)
        adamw: dict[str, Any] = {**ADAMW, "betas": tuple(ADAMW["betas"])}  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)

        def plain(batch: Any) -> None:
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return model, plain
    zero = {**SYSTEMS[args.system], "sub_group_size": 1 << 22}
    if args.nvme:
        place = {"device": "nvme", "nvme_path": args.nvme}
        zero = {"stage": 3, "offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": zero,
        "activation_checkpointing": {"enabled": args.checkpoint},
    }
    with zlaunch.zero.Init(config=config), device:
        model = GPT(size)
    engine, *_ = zlaunch.initialize(model=model, config=config)

    def step(batch: Any) -> None:
        engine.backward(loss_of(engine, batch))
        engine.step()

    return engine.module, step


def worker(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    if cuda and args.cap_gb:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gb * 2**30 / total))
    model, step = build(args)
    device = torch.device("cuda" if cuda else "cpu")
    shape = (args.micro_batch, SIZES[args.model][3] + 1)
    seconds = []
    for index in range(args.steps + 2):
        batch = torch.randint(0, 256, shape, device=device)
        started = time.perf_counter()
        step(batch)
        for parameter in model.parameters():
            parameter.detach()  # what a step has left to the next forward pass is waited for
        if cuda:
            torch.cuda.synchronize()
        if index >= 2:
            seconds.append(time.perf_counter() - started)
    numel = sum(p.numel() for p in model.parameters())
    middle = statistics.median(seconds)
    return {
        "parameters": numel,
        "step_s": round(middle, 4),
        "tokens_per_s": round(args.micro_batch * (shape[1] - 1) / middle),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }


def bounds(numel: int) -> dict[str, float]:
    """Seconds that offloading ``numel`` parameters takes at least: down, up, and the step on the CPU."""
    import torch

    from zlaunch.cuda_ops.step import adam_step
    from zlaunch.runtime.offload.link import HostLink

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    link = HostLink(device, pin=True)
    count = min(numel, 1 << 27)
    host, there = link.empty(count, torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16, device=device)
    state = [torch.zeros(count) for _ in range(3)]
    out = torch.empty(count, dtype=torch.bfloat16)
    scalars: dict[str, Any] = {"step": 5.0, "lr": 1e-4, "multiplier": 0.5, "found_inf": None}
    rates: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def cpu_step() -> None:
        adam_step(*state, host, out, decoupled=True, **rates, **scalars)

    calls = {
        "down_s": lambda: link.download(there, host).wait(),
        "up_s": lambda: link.upload(host, there).wait(),
        "cpu_step_s": cpu_step,
    }
    found: dict[str, float] = {}
    for name, call in calls.items():
        times = []
        for _ in range(6):
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        found[name] = round(statistics.median(times[1:]) * numel / count, 4)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in SYSTEMS:
        cap = args.cap_gb if name.startswith("offload") else 0
        result[name] = run(args, name, args.model, cap)
    plain = result["torch"]
    for found in result.values():
        if "tokens_per_s" in found and "tokens_per_s" in plain:
            found["of_torch"] = round(found["tokens_per_s"] / plain["tokens_per_s"], 3)
    if "parameters" in plain:
        limits = bounds(plain["parameters"])
        limits["compute_s"] = result["stage 2"].get("step_s", plain["step_s"])
        result["bounds of offload"] = limits
        found = result["offload optimizer"]
        if "step_s" in found:
            longest = max(limits["compute_s"], limits["down_s"], limits["up_s"], limits["cpu_step_s"])
            found["over_bound"] = round(found["step_s"] / longest, 3)
    if args.largest:
        result["largest"] = run(args, "offload both", args.largest, 0, checkpoint=True)
    return result


def run(
    args: argparse.Namespace, system: str, model: str, cap_gb: float, checkpoint: bool = False
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large", "--system", system, "--model", model]
    command += ["--steps", str(args.steps), "--cap_gb", str(cap_gb), "--micro_batch", str(args.micro_batch)]
    command += ["--nvme", args.nvme] if args.nvme and system.startswith("offload") else []
    command += ["--checkpoint"] if checkpoint or (cap_gb and args.checkpoint) else []
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {args.limit_s} s"}
    if done.returncode:
        return {"failed": f"exit {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="1500m")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--cap_gb", type=float, default=24.0)
    parser.add_argument("--nvme", default="")
    parser.add_argument("--largest", choices=SIZES)
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations under the cap")
    parser.add_argument("--limit_s", type=float, default=60.0)
    parser.add_argument("--system", choices=SYSTEMS)
    args = parser.parse_args()
    print(json.dumps(worker(args) if args.system else measure(args)))


if __name__ == "__main__":
    main()
