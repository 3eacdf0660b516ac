"""Measure a large model on one device: tokens per second of plain torch, a ZeRO stage, or offload.

    python -m benchmarks.large --system "stage 2" [--model 1500m] [--steps 5] [--cap_gb 24] [--nvme FOLDER]
    python -m benchmarks.large --bounds [--model 1500m]

``benchmarks.gpu`` runs these parts, one system after the other. On a CPU, use a small model to check that it
runs. ``--cap_gb`` limits GPU memory. ``--bounds`` measures the lower bounds of an offloaded step: gradients
down and parameters up over PCIe, and the optimizer's step on the CPU. The system ``torch`` keeps fp32 masters
of a bf16 model, as the stages do. ``narrow`` needs the least memory without offload: 8-bit moments,
stochastic bf16 masters, and never all gradients at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2 stepping": {"stage": 2, "step_in_backward": True},
    "stage 3 stepping": {"stage": 3, "step_in_backward": True},
    "narrow": {"stage": 2, "step_in_backward": True},
    "offload optimizer": {"stage": 2, "offload_optimizer": CPU},
    "offload both": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


def flops_of_a_token(layers: int, width: int, context: int, parameters: int) -> float:
    """Return the operations of forward and backward: 6 for each parameter, and for attention 12 * layers *
    width * context ("PaLM", Chowdhery et al. 2022, appendix B).
    """
    return 6.0 * parameters + 12.0 * layers * width * context


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and a call that makes one step on a batch of tokens."""
    import torch

    import zlaunch
    from examples.gpt import GPT, Size, loss_of

    layers, width, heads, context = SIZES[args.model]
    layers = args.layers or layers
    size = Size(layers=layers, width=width, heads=heads, context=context)
    torch.manual_seed(0)
    device = zlaunch.init_distributed()
    if args.system == "torch":
        with device:  # random numbers for a billion weights take a GPU no time
            model = GPT(size).to(torch.bfloat16)
        adamw: dict[str, Any] = {**ADAMW, "betas": tuple(ADAMW["betas"])}  # type: ignore[arg-type]
        # fp32 masters, as every stage has: a step of bf16 values alone moves less than half of the bytes.
        values: list[torch.Tensor] = list(model.parameters())
        masters = [value.detach().float() for value in values]
        optimizer = torch.optim.AdamW(masters, fused=True, **adamw)

        def plain(batch: Any) -> None:
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(values, 1.0)
            for master, value in zip(masters, values, strict=True):
                assert value.grad is not None
                master.grad = value.grad.float()
                value.grad = None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(values, masters)

        return model, plain
    zero = {**SYSTEMS[args.system], "sub_group_size": 1 << 22}
    if args.nvme:
        place = {"device": "nvme", "nvme_path": args.nvme}
        zero = {"stage": 3, "offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    narrow = args.system == "narrow"
    bf16 = {"enabled": not args.autocast, **({"master_weights": "stochastic"} if narrow else {})}
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "bf16": bf16,
        "torch_autocast": {"enabled": args.autocast},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, **({"state_dtype": "int8"} if narrow else {})}},
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
    layers, width, _, context = SIZES[args.model]
    numel = sum(p.numel() for p in model.parameters())
    middle = statistics.median(seconds)
    speed = args.micro_batch * context / middle
    rests = torch.cuda.memory_allocated() if cuda else 0
    return {
        "parameters": numel,
        "step_s": round(middle, 4),
        "tokens_per_s": round(speed),
        "tflops": round(speed * flops_of_a_token(args.layers or layers, width, context, numel) / 1e12, 3),
        "bytes_of_a_parameter": round(rests / numel, 2) if cuda else None,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }


def bounds(numel: int) -> dict[str, float]:
    """Seconds that offloading ``numel`` parameters takes at least: down, up, and the step on the CPU."""
    import torch

    from zlaunch.cuda_ops.arguments import AdamArgs
    from zlaunch.cuda_ops.step import adam_step
    from zlaunch.runtime.offload.transfer import HostLink

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    link = HostLink(device, pin=True)
    count = min(numel, 1 << 27)
    host, there = link.empty(count, torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16, device=device)
    master, exp_avg, exp_avg_sq = (torch.zeros(count) for _ in range(3))
    out = torch.empty(count, dtype=torch.bfloat16)
    rates: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    args = AdamArgs(lr=1e-4, multiplier=0.5, decoupled=True, **rates)

    def cpu_step() -> None:
        adam_step(master, exp_avg, exp_avg_sq, host, out, 5.0, args)

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="1500m")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model; 0: as the model defines")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--autocast", action="store_true", help="fp32 under torch.autocast to bf16")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--cap_gb", type=float, default=0.0, help="limit of GPU memory in GiB; 0: none")
    parser.add_argument("--nvme", default="")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument("--bounds", action="store_true", help="measure offload bounds: down, up, CPU step")
    args = parser.parse_args()
    if not args.bounds and args.system is None:
        parser.error("give --system or --bounds")
    if args.bounds:
        layers, width, _, _ = SIZES[args.model]
        print(json.dumps(bounds(12 * layers * width * width)))
    else:
        print(json.dumps(worker(args)))


if __name__ == "__main__":
    main()
