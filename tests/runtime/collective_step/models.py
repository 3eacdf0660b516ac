"""A model with odd sizes, the references in plain torch, and the loop that compares engines with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import relative_error

STEPS = 20
FEW = 8
"""Counts the steps after which an error in double precision shows, where no phase comes later."""
SAMPLES = 6
"""Counts those of a global batch: they divide into 1, 2 and 3."""


class Odd(nn.Module):
    """An embedding, matrices of odd sizes in both directions, a convolution, vectors and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 10)  # the last rows are never used
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(10)
        self.convolution = nn.Conv1d(10, 10, 3, padding=1)
        self.head = nn.Linear(10, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(self.convolution(x.transpose(1, 2)).transpose(1, 2))


def odd() -> Odd:
    torch.manual_seed(11)
    return Odd().double()


def data(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 13, (SAMPLES, 8), generator=generator) for _ in range(steps)]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def section(stage: int, **zero: Any) -> dict[str, Any]:
    small = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
    return {"stage": stage, "reduce_bucket_size": 500, "sub_group_size": 4096, **small, **zero}


def offloads(folder: str) -> dict[str, dict[str, Any]]:
    on_disk = {"device": "nvme", "nvme_path": folder}
    return {"": {}, "host": {"offload_optimizer": {"device": "cpu"}}, "nvme": {"offload_optimizer": on_disk}}


def cases_of(world: int) -> set[tuple[int, str]]:
    """Stages and offloads that a test tries in a world: all on two ranks, some on others."""
    if world == 2:
        return {(0, ""), (1, ""), (1, "host"), (2, ""), (2, "nvme"), (3, ""), (3, "host"), (3, "nvme")}
    return {(0, ""), (3, ""), (2, "host") if world == 1 else (1, "nvme")}


def train_reference(
    step: Callable[[nn.Module], Any], steps: Iterable[Tensor], clip: float = 0.0
) -> nn.Module:
    """Train in plain torch; ``step(model)`` makes an object with ``step()``."""
    model = odd()
    optimizer = step(model)
    for tokens in steps:
        model.zero_grad()
        loss_of(model, tokens).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def make_engine(make: Any, zero: dict[str, Any], optimizer: dict[str, Any] | None = None, **more: Any) -> Any:
    world = torch.distributed.get_world_size()
    given = {
        "train_micro_batch_size_per_gpu": SAMPLES // world // more.get("gradient_accumulation_steps", 1),
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        **({"optimizer": optimizer} if optimizer else {}),
        **more,
    }
    model = odd()
    engine, *_ = zlaunch.initialize(model=model, optimizer=make(model) if make else None, config=given)
    return engine


def train(engine: Any, steps: Iterable[Tensor]) -> None:
    rank, world = engine.global_rank, engine.world_size
    for tokens in steps:
        mine = tokens.chunk(world)[rank]
        for micro in mine.chunk(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine, micro.to(engine.device)))
            engine.step()


def error(engine: Any, wanted: nn.Module) -> float:
    """The largest relative difference between an engine's parameters and a model's."""
    found = engine.module.state_dict()
    return max(relative_error(found[name], value) for name, value in wanted.state_dict().items())
