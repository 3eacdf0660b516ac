"""Test ranks whose calls differ: an error names the rank and the call, on every rank, within seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import Layer, batches, config, loss_of, net
from tests.runtime.workers import WorkerError, join, run_workers
from zlaunch.runtime.comm.deadlock import Blocked, in_vain

GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}


def options(stage: int = 3) -> dict[str, Any]:
    """A config with even the smallest blocks sharded."""
    return config(stage, 2, zero={"stage3_module_granularity_threshold": 0})


class Experts(nn.Module):
    """A block that each rank chooses for itself; without the shared one nothing else would be gathered."""

    def __init__(self, equal: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Layer(24), Layer(24 if equal else 16)])
        self.shared = Layer(24)
        self.equal = equal

    def forward(self, x: Tensor, which: int) -> Tensor:
        part = x if self.equal or which == 0 else x[..., :16]
        return self.experts[which](part).square().mean() + self.shared(x).square().mean()


def _experts(equal: bool) -> str:
    rank = join()
    engine, *_ = zlaunch.initialize(model=Experts(equal), config=options())
    with pytest.raises(zlaunch.RankMismatchError) as caught:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 24), rank))
            engine.step()
    return str(caught.value)


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_ranks_that_use_different_blocks_of_one_size(env: dict[str, str]) -> None:
    for message in run_workers(_experts, 2, True, env=env):
        assert "experts.0" in message and "experts.1" in message, message
        assert "rank 0" in message and "rank 1" in message


def test_ranks_that_use_blocks_of_different_sizes() -> None:
    for message in run_workers(_experts, 2, False):
        assert "gathers module 'experts.0' (" in message, message
        assert "rank 1 gathers module '" in message, message


def _alone(what: str) -> None:
    """Rank 0 does something that is collective; the other goes on, or waits at a barrier of the script's."""
    rank = join()
    engine, *_ = zlaunch.initialize(model=net(), config=options(1 if "save" in what else 3))
    tokens = batches(1, 4)[0].chunk(2)[rank]
    alone: dict[str, Callable[[], Any]] = {
        "state_dict, then a barrier": lambda: engine.module.state_dict(),
        "evaluation, then a barrier": lambda: engine(tokens),
        "evaluation, then a step": lambda: engine(tokens),
        "save, then a barrier": lambda: engine.save_checkpoint("never"),
        "save, then a step": lambda: engine.save_checkpoint("never"),
    }
    if rank == 0:
        engine.eval()
        with torch.no_grad():
            alone[what]()
        engine.train()
    if "barrier" in what:
        torch.distributed.barrier()
    for _ in range(3):
        engine.backward(loss_of(engine, tokens))
        engine.step()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "what",
    [
        "state_dict, then a barrier",
        "evaluation, then a barrier",
        "evaluation, then a step",
        "save, then a barrier",
        "save, then a step",
    ],
)
def test_what_one_rank_does_alone(what: str) -> None:
    with pytest.raises(WorkerError) as caught:
        run_workers(_alone, 2, what)
    assert "RankMismatchError" in str(caught.value), str(caught.value)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


def _given_up() -> None:
    """One rank runs out of memory in a forward pass, goes on with the next batch, and the other does not."""
    rank = join()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=options())
    tokens = batches(1, 4)[0].chunk(2)[rank]
    if rank == 1:
        handle = model.layers[1].register_forward_pre_hook(lambda *args: [torch.empty(1 << 60)])
        with pytest.raises(RuntimeError, match="memory"):
            loss_of(engine, tokens)
        handle.remove()
    for _ in range(2):
        engine.backward(loss_of(engine, tokens))
        engine.step()


@pytest.mark.exhaustive
@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_a_pass_that_one_rank_gave_up(env: dict[str, str]) -> None:
    with pytest.raises(WorkerError, match="RankMismatchError"):
        run_workers(_given_up, 2, env=env)


def test_when_two_ranks_wait_in_vain() -> None:
    gather, reduce = (0, "gather", 7), (0, "reduce", 3)
    mine = Blocked(1, gather, "gathers a", "", {"0/gather": 8, "0/reduce": 3})
    assert in_vain(mine, Blocked(1, reduce, "reduces b", "", {"0/gather": 7, "0/reduce": 4}))
    assert in_vain(mine, Blocked(1, None, "calls barrier", "", {"0/gather": 7}))
    assert not in_vain(mine, Blocked(1, gather, "gathers a", "", {"0/gather": 8}))  # both there: it comes
    assert not in_vain(mine, Blocked(1, None, "calls barrier", "", {"0/gather": 8}))  # it has joined mine
    began = Blocked(1, gather, "gathers a", "", {"0/gather": 8, "0/reduce": 4})  # I have joined its own
    assert not in_vain(began, Blocked(1, reduce, "reduces b", "", {"0/gather": 7, "0/reduce": 4}))
    user = Blocked(1, None, "calls barrier", "", {})
    assert not in_vain(user, Blocked(1, None, "calls all_reduce", "", {}))  # torch's own business


class _Mixture(nn.Module):
    """Has layers that ranks can share, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)
        self.experts = zlaunch.Experts([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        mixed: Tensor = self.experts(tokens + self.down(torch.tanh(self.up(tokens))), index, weights)
        return mixed


AXES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": {"autotp_size": 2, "plan": {"up": "colwise", "down": "rowwise"}}},
    "expert": {"parallel": {"expert": 2}},
}


def _by_itself(axis: str, call: str) -> None:
    rank = join()
    samples = 1 if axis == "tensor" else 2
    settings: dict[str, Any] = dict(config(1, samples))
    settings |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4 // samples, **AXES[axis]}
    engine, *_ = zlaunch.initialize(model=_Mixture(), config=settings)
    for step in range(16):
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        engine.step()
        if step == 12 and rank == 0 and call == "state":
            engine.module.state_dict()
        if step == 12 and rank == 0 and call == "evaluation":
            with torch.no_grad():
                engine(torch.ones(2, 8))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axis", "call", "said"),
    [
        ("tensor", "state", "all-gathers a parameter over its tensor-parallel group"),
        ("tensor", "evaluation", "compares its batch in its tensor-parallel group"),
        ("expert", "state", "all-gathers a parameter over its expert-parallel group"),
    ],
    ids=str,
)
def test_a_rank_that_does_alone_what_an_axis_does_together(axis: str, call: str, said: str) -> None:
    with pytest.raises(WorkerError, match="RankMismatchError") as caught:
        run_workers(_by_itself, 2, axis, call)
    message = str(caught.value)
    assert f"rank 0 {said}" in message or f"rank 0 is deadlocked: it {said}" in message, message
