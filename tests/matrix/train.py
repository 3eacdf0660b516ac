"""Gives data and the usual training loop of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.sides import MICRO, Side, Trainer

WIDTH = 24
WORLD = 2
VOCABULARY = 31


def floats(step: int, width: int = WIDTH, length: int = 5, samples: int = MICRO * WORLD) -> tuple[Tensor]:
    """Give a global batch of (samples, length, width) normal numbers."""
    generator = torch.Generator().manual_seed(1000 + step)
    return (torch.randn(samples, length, width, generator=generator, dtype=torch.float64),)


def vectors(step: int, width: int = WIDTH, samples: int = MICRO * WORLD) -> tuple[Tensor]:
    """Give a global batch of (samples, width) normal numbers."""
    return (floats(step, width, 1, samples)[0][:, 0],)


def images(step: int, channels: int = 3, size: int = 8) -> tuple[Tensor]:
    """Give a global batch of small images."""
    generator = torch.Generator().manual_seed(2000 + step)
    return (torch.randn(MICRO * WORLD, channels, size, size, generator=generator, dtype=torch.float64),)


def tokens(step: int, length: int = 6) -> tuple[Tensor]:
    """Give a global batch of tokens."""
    generator = torch.Generator().manual_seed(3000 + step)
    return (torch.randint(0, VOCABULARY, (MICRO * WORLD, length), generator=generator),)


def first_tensor(value: Any) -> Tensor:
    """Find the first tensor in what a model returned."""
    while not isinstance(value, Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


def squared(output: Any) -> Tensor:
    """Give a loss of an output: the mean over its samples of something that is not symmetric."""
    y = first_tensor(output)
    return (y - 0.3).square().mean() + y.sin().mean()


def usual_loss(model: Any, *batch: Any) -> Tensor:
    """Call the model and give :func:`squared` of its output."""
    return squared(model(*batch))


def own_loss(model: Any, *batch: Any) -> Tensor:
    """Call a model that returns its loss."""
    return model(*batch)


def train(
    side: Side,
    model: nn.Module,
    *,
    data: Callable[[int], tuple[Any, ...]] = floats,
    loss: Callable[..., Tensor] = usual_loss,
    steps: int = 4,
    same: bool = False,
    **start: Any,
) -> Trainer:
    """Train by the usual loop; ``same`` gives every rank, and plain torch, the same rows."""
    trainer = side.start(model, **start)
    run_steps(trainer, range(steps), data=data, loss=loss, same=same)
    return trainer


def run_steps(
    trainer: Trainer,
    steps: range,
    *,
    data: Callable[[int], tuple[Any, ...]] = floats,
    loss: Callable[..., Tensor] = usual_loss,
    same: bool = False,
) -> None:
    """Take some steps of the usual loop."""
    side = trainer.side
    for step in steps:
        for micro in range(trainer.accumulation):
            batch = data(step * trainer.accumulation + micro)
            if same:
                mine = tuple(v[:MICRO] if isinstance(v, Tensor) else v for v in batch)
            else:
                mine = tuple(side.share(v) for v in batch)
            value = loss(trainer.call, *mine)
            trainer.backward(value)
            trainer.step()
            side.record_mean(f"loss {step}.{micro}", value)
