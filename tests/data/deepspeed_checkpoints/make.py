"""Make checkpoints with the real DeepSpeed, for the tests of importing them. Where DeepSpeed is installed:

DS_ACCELERATOR=cpu python tests/data/deepspeed_checkpoints/make.py OUT

OUT/STAGE-WORLD[-DTYPE]/ gets the checkpoint, and beside it ``expected.safetensors``: what DeepSpeed's own
zero_to_fp32 makes of it, and the moments as DeepSpeed's own accessors give them; and ``expected.json``: the
mean losses of the three steps that followed. OUT/STAGE-WORLD[-DTYPE]-universal/ gets what ds_to_universal
makes of some of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CASES = [
    *((stage, world, "fp32") for stage in (1, 2, 3) for world in (1, 2)),
    (2, 2, "bf16"),
    (3, 2, "bf16"),
    (0, 1, "fp32"),
    (0, 2, "bf16"),
]
UNIVERSAL = ["stage1-2", "stage2-2", "stage3-2-bf16"]


class Model(nn.Module):
    """Odd sizes, a tied, a frozen and an unused parameter, a buffer, two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 19, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(self.frozen(x)))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 19, (4, 6), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def config(stage: int, dtype: str) -> dict[str, Any]:
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
    }
    if dtype != "fp32":
        given[dtype] = {"enabled": True}
    return given


def work(rank: int, world: int, port: int, stage: int, dtype: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage, dtype))

    def train(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            tokens = batch(step, rank)
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        total = torch.stack(losses)
        torch.distributed.all_reduce(total)
        return (total / world).tolist()

    train(0, 3)
    engine.save_checkpoint(folder, tag="tag", client_state={"note": "hello", "numbers": [1, 2.5]})
    found = {}
    if stage in (1, 2):  # DeepSpeed does this in its own step for its own optimizers alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and stage:
            found[f"{name}/value"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(parameter, key)
                found[f"{name}/{key}"] = value.clone()
    facts = {"lr": engine.get_lr(), "steps": engine.global_steps, "losses": train(3, 6)}
    if rank == 0:
        from safetensors.torch import save_file

        if stage:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            state = get_fp32_state_dict_from_zero_checkpoint(folder)
            found |= {f"fp32/{name}": value for name, value in state.items()}
        save_file(
            {k: v.detach().cpu().float().clone() for k, v in found.items()},
            Path(folder, "expected.safetensors"),
        )
        Path(folder, "expected.json").write_text(json.dumps(facts))
    torch.distributed.barrier()


def main(out: str) -> None:
    context = multiprocessing.get_context("spawn")
    for stage, world, dtype in CASES:
        folder = Path(out, f"stage{stage}-{world}" + (f"-{dtype}" if dtype != "fp32" else ""))
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
        for left in folder.glob("*.py"):
            left.unlink()
        print(folder, flush=True)
    for name in UNIVERSAL:
        folder = Path(out, f"{name}-universal")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in ("expected.safetensors", "expected.json"):
            shutil.copy(Path(out, name, file), folder)
        folders = [
            "--input_folder",
            str(Path(out, name, "tag")),
            "--output_folder",
            str(folder / "tag_universal"),
        ]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        subprocess.run([*command, *folders, *workers], check=True)
        print(folder, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
