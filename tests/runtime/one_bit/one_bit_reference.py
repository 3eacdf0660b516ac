"""1-bit Adam, 0/1 Adam and 1-bit LAMB in plain torch: all ranks in one process, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256
Layout = tuple[int, list[tuple[str, int, int]]]
"""A unit's size, and of each of its parameters the name, the place and the size."""


def signs(x: Tensor) -> Tensor:
    """Returns what comes back of the signs of a flat tensor."""
    blocks = x.view(-1, BLOCK)
    scale = blocks.square().mean(dim=1, keepdim=True).sqrt().float().double()
    return torch.where(blocks >= 0, scale, -scale).view(-1)


class ReferenceOneBit:
    """Steps one model by the gradients of several ranks. What has no variance has no momentum.

    ``dense_next`` makes the next step dense, as the first one after a load is.
    """

    def __init__(self, model: nn.Module, layouts: Sequence[Layout], world: int, **options: Any) -> None:
        self.named = dict(model.named_parameters())
        self.layouts, self.world, self.o = layouts, world, options
        self.m = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.fresh: dict[str, Tensor] = {}
        self.coefficient = dict.fromkeys(self.named, 0.0)
        self.factor = dict.fromkeys(self.named, 1.0)
        self.t, self.interval, self.counter = 0, 1, 0
        self.dense_next = False
        self.forget()

    def forget(self) -> None:
        """Errors begin anew."""
        self.worker: dict[int, list[Tensor]] = {}
        self.server: dict[int, Tensor] = {}
        self.of_momentum = False

    def flat(self, unit: int, values: dict[str, Tensor]) -> Tensor:
        numel, slots = self.layouts[unit]
        found = torch.zeros(numel, dtype=torch.float64)
        for name, offset, size in slots:
            found[offset : offset + size] = values[name].reshape(-1)
        return found

    def split(self, unit: int, values: Tensor) -> dict[str, Tensor]:
        return {
            name: values[offset : offset + size].view_as(self.named[name])
            for name, offset, size in self.layouts[unit][1]
        }

    def exchange(self, what: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Both hops for what each rank has; errors are taken along."""
        found: dict[str, Tensor] = {}
        for unit, (numel, slots) in enumerate(self.layouts):
            covered = torch.zeros(numel, dtype=torch.bool)
            for _, offset, size in slots:
                covered[offset : offset + size] = True
            lost = self.worker.setdefault(unit, [torch.zeros(numel, dtype=torch.float64)] * self.world)
            sent = []
            for rank in range(self.world):
                whole = self.flat(unit, what[rank]) + torch.where(covered, lost[rank], 0.0)
                sent.append(signs(whole))
                lost[rank] = whole - sent[-1]
            mean = sum(sent[1:], sent[0]) / self.world + self.server.get(unit, torch.zeros(()))
            back = torch.cat([signs(part) for part in mean.chunk(self.world)])
            self.server[unit] = mean - back
            found |= self.split(unit, back)
        return found

    @torch.no_grad()
    def step(self, grads: list[dict[str, Tensor]]) -> None:
        o, self.t = self.o, self.t + 1
        b1, b2 = o.get("betas", (0.9, 0.999))
        mean = {name: sum(g[name] for g in grads) / self.world for name in self.named}
        frozen = self.t > o["freeze_step"]
        by_sign = frozen
        if o["kind"] == "ZeroOneAdam" and not frozen:
            by_sign = self.t % self.interval != 0
        by_sign = by_sign and not self.dense_next
        self.dense_next = False
        before = {name: m.clone() for name, m in self.m.items()}
        if by_sign and frozen:
            if not self.of_momentum:
                self.forget()
                self.of_momentum = True
                self.sent = self.m
            given = [{n: b1 * self.sent[n] + (1 - b1) * g[n] for n in self.named} for g in grads]
            self.sent = self.exchange(given)
            self.m = {n: m * (self.v[n] != 0) for n, m in self.sent.items()}
        elif by_sign:
            hat = self.exchange(grads)
            self.m = {n: (b1 * m + (1 - b1) * hat[n]) * (self.v[n] != 0) for n, m in self.m.items()}
        else:
            self.m = {n: b1 * m + (1 - b1) * mean[n] for n, m in self.m.items()}
            if frozen:
                self.m = {n: m * (self.v[n] != 0) for n, m in self.m.items()}
            else:
                self.v = {n: b2 * v + (1 - b2) * mean[n] ** 2 for n, v in self.v.items()}
        for name, p in self.named.items():
            self.move(name, p, before[name], frozen)
        if o["kind"] == "ZeroOneAdam" and not frozen and self.t % self.interval == 0:
            self.counter += 1
            if self.counter == o["var_update_scaler"]:
                self.counter, self.interval = 0, 2 * self.interval

    def move(self, name: str, p: Tensor, before: Tensor, frozen: bool) -> None:
        o = self.o
        b1, b2 = o.get("betas", (0.9, 0.999))
        m, v, eps, decay, lr = (
            self.m[name],
            self.v[name],
            o.get("eps", 1e-8),
            o.get("weight_decay", 0.0),
            o["lr"],
        )
        plain = m / (v.sqrt() + eps)
        r = plain + decay * p
        ratio = 1.0
        if o["kind"] == "OneBitLamb" and not frozen:
            ratio = float(p.norm() / r.norm()) if p.norm() > 0 and r.norm() > 0 else 1.0
            ratio = min(max(ratio, 0.01), 10.0)
            self.coefficient[name] = 0.9 * self.coefficient[name] + 0.1 * ratio
        elif o["kind"] == "OneBitLamb":
            fresh = self.fresh.get(name, v)
            g = (m - b1 * before) / (1 - b1)
            self.fresh[name] = fresh = b2 * fresh + (1 - b2) * g**2
            factor = float(((v.sqrt() + eps) / (fresh.sqrt() + eps)).max())
            if decay:
                share = min(1.0, float(plain.norm() / r.norm()))
                factor = factor * share + 1 - share
            factor = min(max(factor, 0.5), 4.0)
            factor = min(max(factor, 0.9 * self.factor[name]), 1.1 * self.factor[name])
            self.factor[name] = factor
            ratio = self.coefficient[name] * factor
        p -= lr * ratio * r
