"""Measure tensor parallelism beside torch's own.

    python -m benchmarks.tensor_parallel [--layers 8] [--width 384] [--rounds 9] [--out FILE.json]

The model is a Hugging Face Llama in float32. torch's parallelize_module shards the same layers. The same
processes build all systems, which take turns. Ratios are medians over the rounds of the ratios within a
round. "tensor 1" (and experts) and "sequence 1" (and stages) show the cost of the section at size 1. Needs
transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
WORDS = 256
PAIRS = (("tensor", "torch"), ("tensor 1", "whole"), ("sequence 1", "whole"))


def _model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _ours(args: argparse.Namespace, parallel: dict[str, int] | None) -> Callable[[Any], float]:
    import zlaunch

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": 0},
    }
    if parallel is not None:
        config["parallel"] = parallel
    engine, *_ = zlaunch.initialize(model=_model(args), config=config)

    def step(batch: Any) -> float:
        loss = engine(batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _torch(args: argparse.Namespace) -> Callable[[Any], float]:
    """Cut a model by torch, where the model's plan does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _model(args)
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": rest}], fused=True, **ADAMW)  # type: ignore[arg-type]

    def step(batch: Any) -> float:
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def work(args: argparse.Namespace) -> None:
    """Time the systems in turn; rank 0 writes what it has measured."""
    import torch
    import torch.distributed as dist

    from zlaunch.runtime.comm.process_group import init_distributed

    init_distributed()
    systems = {
        "tensor": _ours(args, {"tensor": dist.get_world_size()}),
        "torch": _torch(args),
        "whole": _ours(args, None),
        "tensor 1": _ours(args, {"tensor": 1, "expert": 1}),
        "sequence 1": _ours(args, {"sequence": 1, "pipeline": 1}),
    }
    generator = torch.Generator().manual_seed(1)

    def batch() -> Any:
        return torch.randint(0, WORDS, (args.micro_batch, args.context), generator=generator)

    same = [batch() for _ in range(3)]
    losses = {name: [step(each) for each in same][-1] for name, step in systems.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(args.rounds):
        for name in systems if turn % 2 == 0 else reversed(systems):
            gc.collect()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(args.steps):
                systems[name](batch())
            dist.barrier()
            seconds[name].append((time.perf_counter() - started) / args.steps)
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps({"seconds": seconds, "losses": losses}))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", help="write everything measured to this JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        sizes = ("layers", "width", "context", "micro_batch", "rounds", "steps")
        options = [f"--{name}={getattr(args, name)}" for name in sizes]
        command = [sys.executable, "-m", "zlaunch", "--quiet", "--no_local_rank"]
        command += ["--num_gpus", str(args.ranks), "--run_dir", f"{folder}/run"]
        command += ["--module", "benchmarks.tensor_parallel", "--worker", f"--out={out}", *options]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=env)
        found = json.loads(out.read_text())
    seconds = found["seconds"]
    for name, taken in seconds.items():
        print(f"{name:10} {statistics.median(taken):7.3f} s a step   loss {found['losses'][name]:.6f}")
    ratios = {}
    for name, other in PAIRS:
        pairs = zip(seconds[other], seconds[name], strict=True)
        ratios[f"{name} / {other}"] = statistics.median(a / b for a, b in pairs)
        print(f"speed of {name} beside {other}: {ratios[f'{name} / {other}']:.3f}")
    if args.out:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({"arguments": vars(args), "machine": machine, "ratios": ratios, **found}, indent=1)
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
