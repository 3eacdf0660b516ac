"""Test parameters that several stages have, and that are frozen and unfrozen while a pipeline trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.pipeline_parallel.test_refusals import Network, config, loss_fn, micro_batches
from tests.runtime.workers import join, run_workers

FROZEN_STEPS = {"tied": (0, 3), "first stage": (0, 1), "second layers": (0, 1, 2, 3)}
"""Maps what is frozen to the steps in which it is; it is trained in the others of STEPS."""
STEPS = 6


class Tied(Network):
    """Uses the embedding's weight in the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.words.weight

    def freeze(self, step: int) -> None:
        """Set what requires a gradient in a step."""
        for parameter in (self.words.weight, self.head.bias):
            parameter.requires_grad_(step not in FROZEN_STEPS["tied"])
        self.layers[0].requires_grad_(step not in FROZEN_STEPS["first stage"])
        for layer in (self.layers[1], self.layers[3]):
            layer.requires_grad_(step not in FROZEN_STEPS["second layers"])


def double(gradient: Tensor) -> Tensor:
    """Return twice the gradient, as a hook of the script."""
    return gradient * 2


def _train(stages: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train with weights that are frozen in some steps, and with a hook from after the start on one."""
    join()
    torch.set_default_dtype(torch.float64)
    model, data, losses = Tied(), micro_batches(2), []
    model.freeze(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine: Any = None
    if stages > 1:
        given = config(parallel={"pipeline": stages}, gradient_clipping=0.2)
        del given["optimizer"]
        engine = zlaunch.initialize(model=model, optimizer=optimizer, config=given)[0]
    for step in range(STEPS):
        model.freeze(step)
        if step == 2:
            model.words.weight.register_hook(double)
        if engine is not None:
            if step == 4:  # what was unfrozen is first seen by an evaluation
                losses.append(engine.eval_batch(iter(data), loss_fn).item())
            losses.append(engine.train_batch(iter(data), loss_fn).item())
            continue
        loss = torch.stack([loss_fn(model(words), labels) for words, labels in data]).mean()
        if step == 4:
            losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_tied_parameter_unfrozen_later_is_trained_by_all_stages_together() -> None:
    losses, weights = run_workers(_train, 1, 1)[0]
    for own, state in run_workers(_train, 2, 2):
        assert own == pytest.approx(losses, abs=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
