"""0/1 Adam with local steps in plain torch: all ranks in one process, in float64, each with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.collective_step.models import loss_of
from tests.runtime.one_bit.one_bit_reference import Layout, ReferenceOneBit


class ReferenceLocalSteps:
    """Trains one model as several ranks do: by ``ReferenceOneBit`` until the variance is frozen, then by
    Algorithm 1 of the paper, with decay of the weights that all ranks had.
    """

    def __init__(self, model: nn.Module, layouts: Sequence[Layout], world: int, **options: Any) -> None:
        self.model, self.world, self.o = model, world, options
        self.first = ReferenceOneBit(model, layouts, world, kind="ZeroOneAdam", **options)
        self.named = self.first.named
        self.interval, self.counter, self.rates = 1, 0, 0.0
        self.exchanges = 0
        self.apart = False

    def _begin(self) -> None:
        if self.apart:
            return
        zeros = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.z = {name: p.detach().clone() for name, p in self.named.items()}
        self.u = [dict(zeros) for _ in range(self.world)]
        self.m = [{name: m.clone() for name, m in self.first.m.items()} for _ in range(self.world)]
        self.x = [{name: z.clone() for name, z in self.z.items()} for _ in range(self.world)]
        self.apart = True

    def root(self, name: str) -> Tensor:
        return self.first.v[name].sqrt() + self.o["eps"]

    def train(self, steps: Sequence[Tensor]) -> None:
        for tokens in steps:
            grads = []
            for rank, part in enumerate(tokens.chunk(self.world)):
                if self.apart:
                    self.show(rank)
                self.model.zero_grad()
                loss_of(self.model, part).backward()
                grads.append({n: p.grad.clone() for n, p in self.named.items() if p.grad is not None})
            if self.first.t < self.o["freeze_step"] or self.first.dense_next:
                self.first.step(grads)
            else:
                self.first.t += 1
                self.local(grads)
            if self.first.t > self.o["freeze_step"]:
                self.counter += 1
                if self.counter == self.o["local_step_scaler"]:
                    self.counter, self.interval = 0, min(self.o["local_step_clipper"], 2 * self.interval)

    @torch.no_grad()
    def local(self, grads: list[dict[str, Tensor]]) -> None:
        if self.first.t == self.o["freeze_step"] + 1:
            self.first.forget()  # the errors were those of gradients
        if not self.apart:
            self._begin()
        lr, b1 = self.o["lr"], 0.9
        self.rates += lr
        for name in self.named:
            self.z[name] = self.z[name] * (1 - lr * self.o.get("weight_decay", 0.0))
            for rank in range(self.world):
                m = (b1 * self.m[rank][name] + (1 - b1) * grads[rank][name]) * (self.first.v[name] != 0)
                self.m[rank][name] = m
                self.u[rank][name] = self.u[rank][name] + lr * m
                self.x[rank][name] = self.z[name] - self.u[rank][name] / self.root(name)
        if self.first.t % self.interval == 0:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        self.exchanges += 1
        mean = self.first.exchange(self.u)
        for name, p in self.named.items():
            given = mean[name] * (self.first.v[name] != 0)
            p.copy_(self.z[name] - given / self.root(name))
            self.first.m[name] = given / self.rates
        self.rates, self.apart = 0.0, False

    @torch.no_grad()
    def show(self, rank: int) -> None:
        """Give the model the weights of a rank."""
        for name, p in self.named.items():
            if self.apart:
                p.copy_(self.x[rank][name])
