"""Define small models and a plain torch training loop to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, a list of layers, a norm and a head that may be tied to the embedding: a transformer's
    skeleton.
    """

    def __init__(self, width: int = 24, depth: int = 3, vocabulary: int = 31, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        # torch types the items as Module, and their attributes as Tensor | Module
        self.layers: Any = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def net(**options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options)


def batches(steps: int, samples: int, length: int = 6, vocabulary: int = 31) -> list[Tensor]:
    """``steps`` global batches of (samples, length + 1) tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocabulary, (samples, length + 1), generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())


def config(stage: int, micro: int, accumulation: int = 1, clip: float = 0.0, **extra: Any) -> dict[str, Any]:
    """A config in which even tiny blocks are sharded."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 4000}
    optimizer = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {**zero, **extra.pop("zero", {})},
        "optimizer": extra.pop("optimizer", optimizer),
        **extra,
    }


def train_plain(
    model: nn.Module, data: list[Tensor], clip: float = 0.0, optimizer: Any = None
) -> list[float]:
    """Plain torch in one process on the whole global batch."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_engine(engine: Any, data: list[Tensor], loss_function: Any = loss_of) -> list[float]:
    """Train an engine on its device as :func:`train_plain` does: each rank takes its share of every global
    batch, in micro-batches.
    """
    rank, world = engine.global_rank, engine.world_size
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for batch in data:
        total = 0.0
        for micro in batch.chunk(world * accumulation)[rank * accumulation : (rank + 1) * accumulation]:
            loss = loss_function(engine, micro.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        losses.append(total)
    return losses


def grad_of(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter that has one."""
    grad = parameter.grad
    assert grad is not None
    return grad


def with_forward(model: Any, forward: Callable[[Tensor], Tensor]) -> Any:
    """Gives the model another forward function; returns the model."""
    model.forward = forward
    return model


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest error, relative to the largest element; the tensors may be on different devices."""
    exact = want.double().cpu()
    return ((got.double().cpu() - exact).abs().max() / exact.abs().max().clamp_min(1e-12)).item()
