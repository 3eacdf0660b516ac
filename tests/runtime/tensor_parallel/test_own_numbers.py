"""Test the random numbers of ranks that share layers: their own between cut layers, the same elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.runtime.model_parallel import settings
from tests.runtime.workers import join, run_workers

WIDTH = 32
PLAN = {
    f"{block}.{name}": style
    for block in ("first", "second")
    for name, style in (("up", "colwise"), ("down", "rowwise"))
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = hidden + self.outer(self.down(self.inner(torch.tanh(self.up(hidden)))))
        return found


class _Blocks(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.second = _Block(), _Block()

    def forward(self, hidden: Tensor) -> Tensor:
        for block in (self.first, self.second):
            if self.recompute == "inside":  # ends where the region has not
                inner = checkpoint(lambda x, b=block: torch.tanh(b.up(x)), hidden, use_reentrant=False)
                hidden = hidden + block.outer(block.down(block.inner(inner)))
            elif self.recompute:
                kept = self.recompute == "reentrant"
                hidden = checkpoint(block, hidden, use_reentrant=kept)
            else:
                hidden = block(hidden)
        return hidden


def _train(recompute: str) -> tuple[dict[str, Tensor], list[Tensor], list[float]]:
    """Return the gradients' effect, what the dropouts have dropped in the first pass, and the losses."""
    rank = join()
    torch.manual_seed(7)
    model = _Blocks(recompute)
    masks: list[Tensor] = []
    if not recompute:
        for block in (model.first, model.second):
            for child in (block.inner, block.outer):
                child.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    config = settings(1, 2, 1, tensor_parallel={"plan": PLAN})
    engine, *_ = zlaunch.initialize(model=model, config=config)
    torch.manual_seed(rank)
    losses = []
    for step in range(3):
        hidden = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), requires_grad=True)
        loss = engine(hidden).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    numbers = torch.rand(3)  # of the state that the ranks share
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    return state | {"numbers": numbers}, masks[:4], losses


def test_ranks_drop_other_places_of_their_parts_alone() -> None:
    (_, first, losses), (_, second, others) = run_workers(_train, 2, "")
    assert losses == others
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        inside = index % 2 == 0
        assert torch.equal(one, other) is not inside
        assert 0.3 < one.double().mean() < 0.7
    assert not torch.equal(first[0], first[2])  # and others in each layer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant", "inside"])
def test_a_recomputation_drops_the_same(recompute: str) -> None:
    (wanted, _, losses), _ = run_workers(_train, 2, "")
    for found, _, again in run_workers(_train, 2, recompute):
        assert again == pytest.approx(losses, rel=1e-6)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def _in_evaluation() -> list[Any]:
    join()
    model = _Blocks("").eval()
    engine, *_ = zlaunch.initialize(
        model=model, config=settings(0, 2, 1, tensor_parallel={"plan": PLAN}, gradient_clipping=0.0)
    )
    before = torch.get_rng_state()
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(2, WIDTH))
    same = bool(torch.equal(before, torch.get_rng_state()))
    engine.train()
    try:
        model.first.up(torch.ones(2, WIDTH, requires_grad=True))
        raise RuntimeError("in the middle")  # of what a script computes
    except RuntimeError:
        engine(torch.ones(2, WIDTH))
    return [same, torch.rand(4)]


def test_evaluation_draws_nothing_and_nothing_stays() -> None:
    (same, one), (_, other) = run_workers(_in_evaluation, 2)
    assert same and torch.equal(one, other)
