"""Define the model and the data of ``side_by_side.py``."""

from __future__ import annotations

import torch


class Net(torch.nn.Module):
    """Three blocks of equal width with a tied head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
            for _ in range(3)
        )
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 50, (4, 8), generator=generator)
