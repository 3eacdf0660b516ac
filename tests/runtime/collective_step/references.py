"""LAMB and Muon in plain torch, straight from the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from zlaunch.runtime.optim import muon


class ReferenceLamb:
    """Algorithm 2 of You et al., 2019, with bounds of the ratio."""

    def __init__(
        self, model: nn.Module, lr: float = 0.01, decay: float = 0.1, eps: float = 1e-6, **options: Any
    ) -> None:
        self.parameters = list(model.parameters())
        self.lr, self.decay, self.eps, self.options = lr, decay, eps, options
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.t = [0] * len(self.parameters)

    @torch.no_grad()
    def step(self) -> None:
        b1, b2 = self.options.get("betas", (0.9, 0.999))
        corrected = self.options.get("bias_correction", True)
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            self.t[i] += 1
            self.m[i] = b1 * self.m[i] + (1 - b1) * p.grad
            self.v[i] = b2 * self.v[i] + (1 - b2) * p.grad**2
            m = self.m[i] / (1 - b1 ** self.t[i]) if corrected else self.m[i]
            v = self.v[i] / (1 - b2 ** self.t[i]) if corrected else self.v[i]
            below = (v + self.eps).sqrt() if self.options.get("eps_inside_sqrt") else v.sqrt() + self.eps
            r = m / below + self.decay * p
            ratio = 1.0
            if p.norm() > 0 and r.norm() > 0:
                low, high = self.options.get("min_coeff", 0.01), self.options.get("max_coeff", 10.0)
                ratio = min(max(float(p.norm() / r.norm()), low), high)
            p.sub_(self.lr * ratio * r)


def multiply_exactly() -> None:
    """Let Muon multiply in double precision: in bf16 another processor's order of sums is another number."""
    muon.PRODUCTS = torch.float64


def reference_orthogonal(x: Tensor) -> Tensor:
    """Five steps of the quintic iteration, of a matrix in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16().to(muon.PRODUCTS)
    y = y if x.size(0) <= x.size(1) else y.T
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        g = y @ y.T
        y = torch.addmm(y, torch.addmm(g, g, g, beta=b, alpha=c), y, beta=a)
    return (y if x.size(0) <= x.size(1) else y.T).bfloat16()


class ReferenceMuon:
    """Muon for the hidden matrices of ``Odd``, AdamW for the rest."""

    def __init__(self, model: nn.Module, lr: float = 0.02, adam_lr: float = 3e-3, decay: float = 0.1) -> None:
        self.lr, self.decay = lr, decay
        named = dict(model.named_parameters())
        self.matrices = [p for name, p in named.items() if is_hidden(name, p)]
        rest = [p for name, p in named.items() if not is_hidden(name, p)]
        self.adamw = torch.optim.AdamW(rest, lr=adam_lr, weight_decay=decay)
        self.buffers = [torch.zeros_like(p) for p in self.matrices]

    @torch.no_grad()
    def step(self) -> None:
        for p, buffer in zip(self.matrices, self.buffers, strict=True):
            if p.grad is None:
                continue
            buffer.mul_(0.95).add_(p.grad, alpha=0.05)
            update = 0.05 * p.grad + 0.95 * buffer
            rows = p.size(0)
            flat = reference_orthogonal(update.reshape(rows, -1)).view_as(p).double()
            p.mul_(1 - self.lr * self.decay)
            p.sub_(self.lr * math.sqrt(max(1.0, rows / (p.numel() / rows))) * flat)
        self.adamw.step()


def is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and not name.startswith(("embedding", "head"))
