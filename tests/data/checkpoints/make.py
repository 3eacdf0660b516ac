"""Makes the small checkpoints of this folder, which later versions have to load.

They were made on a CPU with the code of commit a4fb4fb and torch 2.13::

    PYTHONPATH=CHECKOUT python tests/data/checkpoints/make.py OUT

OUT/CASE/ gets the checkpoint; ``expected.safetensors``, the fp32 values and moments as the accessors of
single parameters give them; and ``expected.json``, the mean losses and the learning rates of the steps that
followed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zlaunch

CASES = {"stage3-2-fp32": (3, 2, "fp32"), "stage1-1-bf16": (1, 1, "bf16")}
"""Stage, world size and precision of each."""
SAVED_AT = 4
"""Steps before the save; as many follow it."""
SAMPLES = 12
"""Samples of a step over all ranks."""


class Model(nn.Module):
    """Odd sizes, a tied, a frozen and an integer parameter, buffers, two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 19, bias=False)
        self.head.weight = self.embedding.weight
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(self.frozen(x)))


def build(stage: int, dtype: str, seed: int) -> Any:
    """Returns an engine whose model, built from ``seed``, is trained with Adam and a schedule."""
    device = zlaunch.init_distributed()
    torch.manual_seed(seed)
    model = Model().to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    given: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // torch.distributed.get_world_size(),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 7}},
    }
    if dtype != "fp32":
        given[dtype] = {"enabled": True}
    return zlaunch.initialize(model=model, model_parameters=groups, config=given)[0]


def train(engine: Any, first: int, last: int) -> dict[str, list[float]]:
    """Trains steps ``first`` to ``last`` on the same samples whatever the world size; returns the mean losses
    and the learning rates.
    """
    losses, rates = [], []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        samples = torch.randint(0, 19, (SAMPLES, 6), generator=generator).to(engine.device)
        tokens = samples.chunk(engine.world_size)[engine.global_rank]
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        rates.append(engine.get_lr()[0])
        losses.append(loss.detach())
    total = torch.stack(losses)
    torch.distributed.all_reduce(total)
    return {"losses": (total / engine.world_size).tolist(), "rates": rates}


def _copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().cpu().float().clone()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the fp32 values and the moments of the trained parameters by name, whole. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[f"{name}/value"] = zlaunch.safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/{key}"] = zlaunch.safe_get_full_optimizer_state(parameter, key)
    return {name: _copy(tensor) for name, tensor in found.items()}


def work(rank: int, world: int, port: int, stage: int, dtype: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    engine = build(stage, dtype, seed=0)
    train(engine, 0, SAVED_AT)
    note = {"note": ("hello", 2.5), "tensor": torch.arange(3), "rank": rank}
    engine.save_checkpoint(folder, client_state=note)
    state = state_of(engine.module)
    following = train(engine, SAVED_AT, 2 * SAVED_AT)
    if rank == 0:
        from safetensors.torch import save_file

        save_file(state, Path(folder, "expected.safetensors"))
        Path(folder, "expected.json").write_text(json.dumps(following, indent=1) + "\n")
    engine.destroy()


def main(out: str) -> None:
    context = multiprocessing.get_context("spawn")
    for name, (stage, world, dtype) in CASES.items():
        folder = Path(out, name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with socket.socket() as held:  # bound, not listening: nobody but rank 0 gets the port
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
            jobs = [
                context.Process(target=work, args=(rank, world, port, stage, dtype, str(folder)))
                for rank in range(world)
            ]
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()
                if job.exitcode:
                    raise SystemExit(f"{folder}: a worker ended with {job.exitcode}")
        for script in folder.rglob("*.py"):  # the program put beside each checkpoint
            script.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
