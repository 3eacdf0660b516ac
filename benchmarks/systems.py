"""Build the same model and optimizer step under zlaunch, DDP, FSDP2 and DeepSpeed, behind one call."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt import GPT, Size, loss_of


class Step:
    """One optimizer step on a (batch, time + 1) micro-batch, as a call that returns the loss."""

    def __init__(self, model: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        self._model, self._run = model, run

    def __call__(self, batch: Tensor) -> Tensor:
        return self._run(batch)

    def drain(self) -> None:
        """Touch every parameter: what a step has left to the next forward pass is waited for."""
        for parameter in self._model.parameters():
            parameter.detach()


CLIP = 1.0
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MODELS = {
    "15m short": Size(layers=8, width=384, heads=6, context=32),
    "15m": Size(layers=8, width=384, heads=6, context=128),
    "40m": Size(layers=12, width=512, heads=8, context=128),
    "100m": Size(layers=12, width=768, heads=12, context=256),
}


def _model(size: Size, device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(size).to(device)


def _torch_step(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Step(model, step)


def compute(size: Size, device: torch.device) -> Step:
    """One process by itself: what no communication at all would cost."""
    return _torch_step(_model(size, device))


def ddp(size: Size, device: torch.device) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return _torch_step(DistributedDataParallel(_model(size, device), gradient_as_bucket_view=True))


def fsdp2(size: Size, device: torch.device) -> Step:
    return _fsdp2(size, device, (torch.distributed.get_world_size(),))


def hsdp(size: Size, device: torch.device) -> Step:
    """FSDP2 with hybrid sharding: sharded inside each node, replicated between them."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    return _fsdp2(size, device, (torch.distributed.get_world_size() // ranks, ranks))


def _fsdp2(size: Size, device: torch.device, shape: tuple[int, ...]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    model = _model(size, device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _torch_step(model)


def _engine_step(engine: Any) -> Step:
    def step(batch: Tensor) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Step(engine.module, step)


def _config(stage: int, micro_batch: int, **zero: object) -> dict[str, object]:
    params = {"lr": ADAMW["lr"], "betas": list(ADAMW["betas"]), "weight_decay": ADAMW["weight_decay"]}  # type: ignore[call-overload]
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage, **zero},
    }


def zero(stage: int, micro_batch: int, **more: object) -> Callable[[Size, torch.device], Step]:
    """This project's engine at a ZeRO stage."""

    def build(size: Size, device: torch.device) -> Step:
        import zlaunch

        engine, *_ = zlaunch.initialize(
            model=_model(size, device), config=_config(stage, micro_batch, **more)
        )
        return _engine_step(engine)

    return build


FROZEN: dict[str, dict[str, object]] = {
    "OneBitAdam": {"freeze_step": 1},
    "ZeroOneAdam": {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 8},
}
"""Freezes the variance from the second step on; after four steps 0/1 Adam exchanges once in 8."""


def one_bit(stage: int, micro_batch: int, kind: str = "OneBitAdam") -> Callable[[Size, torch.device], Step]:
    """This project's engine with an optimizer that exchanges signs."""

    def build(size: Size, device: torch.device) -> Step:
        import zlaunch

        config = _config(stage, micro_batch)
        optimizer: Any = config["optimizer"]
        frozen = {"type": kind, "params": {**optimizer["params"], **FROZEN[kind]}}
        engine, *_ = zlaunch.initialize(model=_model(size, device), config={**config, "optimizer": frozen})
        return _engine_step(engine)

    return build


def deepspeed(stage: int, micro_batch: int, **more: object) -> Callable[[Size, torch.device], Step]:
    """The real DeepSpeed, with torch's fused AdamW so that only the runtime differs."""

    def build(size: Size, device: torch.device) -> Step:
        import deepspeed as real

        config = {k: v for k, v in _config(stage, micro_batch, **more).items() if k != "optimizer"}
        model = _model(size, device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]
        engine, *_ = real.initialize(model=model, optimizer=optimizer, config=config)
        return _engine_step(engine)

    return build


def available(micro_batch: int, peers: bool) -> dict[str, Callable[[Size, torch.device], Step]]:
    """Builders by name, peers last."""
    systems: dict[str, Callable[[Size, torch.device], Step]] = {
        f"stage {stage}": zero(stage, micro_batch) for stage in range(4)
    }
    systems |= {f"1-bit {stage}": one_bit(stage, micro_batch) for stage in range(4)}
    systems["0/1 local 0"] = one_bit(0, micro_batch, "ZeroOneAdam")
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if node > 1:
        systems |= {
            "stage 3 auto": zero(3, micro_batch, shard_group="auto"),
            "stage 3 node": zero(3, micro_batch, shard_group="node"),
            "stage 3 copies": zero(3, micro_batch, zero_hpz_partition_size=node),
            "stage 3 packed": zero(
                3,
                micro_batch,
                zero_hpz_partition_size=node,
                zero_quantized_gradients=True,
            ),
            "stage 3 zero++": zero(
                3,
                micro_batch,
                zero_hpz_partition_size=node,
                zero_quantized_weights=True,
                zero_quantized_gradients=True,
            ),
        }
    if peers:
        systems = {"compute": compute, "ddp": ddp, **systems, "fsdp2": fsdp2, "hsdp": hsdp}
        if importlib.util.find_spec("deepspeed"):
            systems |= {f"deepspeed {stage}": deepspeed(stage, micro_batch) for stage in range(1, 4)}
            if node > 1:
                systems["deepspeed hpz"] = deepspeed(3, micro_batch, zero_hpz_partition_size=node)
    return systems
