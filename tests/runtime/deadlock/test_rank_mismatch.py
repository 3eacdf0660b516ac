"""Test ranks whose calls differ: an error names the rank and the call, on every rank, within seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import zlaunch
from tests.runtime.models import Layer, batches, config, loss_of, net
from tests.runtime.workers import WorkerError, join, run_workers
from zlaunch.runtime.comm import deadlock
from zlaunch.runtime.comm.deadlock import Blocked, DeadlockWatch, Judge
from zlaunch.runtime.comm.pending import Key, Waits

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
    deadlock.PERIOD_S = 0.2
    deadlock._GRACE_S = 1.0
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


Waiting = tuple[int, Key | None, dict[str, int]]
"""The number of a rank's wait, its collective, and what the rank has started."""


def _verdicts(*looks: tuple[Waiting | None, ...], slow: int | None = None) -> dict[int, str]:
    """Return what the judge says at its last look; the thread of rank ``slow`` has looked only once."""
    judge, found = Judge(), dict[int, str]()
    for beat, ranks in enumerate(looks):
        blocked = {
            rank: Blocked(
                waiting[0], waiting[1], f"does {waiting[1]}", "", waiting[2], 0 if rank == slow else beat
            )
            for rank, waiting in enumerate(ranks)
            if waiting is not None
        }
        found = judge.look(blocked)
    return found


GATHER, REDUCE = (0, "gather", 7), (0, "reduce", 3)
IN_GATHER: Waiting = (1, GATHER, {"0/gather": 8, "0/reduce": 3})
IN_REDUCE: Waiting = (1, REDUCE, {"0/gather": 7, "0/reduce": 4})


@pytest.mark.parametrize(
    ("other", "in_vain"),
    [
        (IN_REDUCE, True),
        ((1, None, {"0/gather": 7}), True),
        ((1, GATHER, {"0/gather": 8}), False),  # both are there: it comes
        ((1, None, {"0/gather": 8}), False),  # it has joined mine
    ],
    ids=str,
)
def test_when_two_ranks_wait_in_vain(other: Waiting, in_vain: bool) -> None:
    found = _verdicts(*[(IN_GATHER, other)] * 5)
    assert set(found) == ({0, 1} if in_vain else set())
    if in_vain:
        assert found[0].startswith(f"rank 0 is deadlocked: it does {GATHER}, while rank 1 does {other[1]}")


def test_a_wait_that_is_not_in_vain() -> None:
    began: Waiting = (1, GATHER, {"0/gather": 8, "0/reduce": 4})  # it has joined what the other waits for
    assert not _verdicts(*[(began, IN_REDUCE)] * 9)
    user: Waiting = (1, None, {})
    assert not _verdicts(*[(user, user)] * 9)  # torch's own business
    waits: Waiting = (1, GATHER, {"0/gather": 8, "0/reduce": 3})
    joins: Waiting = (1, GATHER, {"0/gather": 8, "0/reduce": 4})  # a thread in the background joins the other
    assert not _verdicts(*[(waits, IN_REDUCE)] * 4, *[(joins, IN_REDUCE)] * 4)


def test_ranks_have_to_wait_at_one_moment() -> None:
    """A rank is known to have been in its wait at a look once it has looked twice after that."""
    both = (IN_GATHER, IN_REDUCE)
    assert set(_verdicts(*[both] * 5)) == set(_verdicts(*[both] * 50)) == {0, 1}
    assert not _verdicts(*[both] * 4)
    assert not _verdicts(*[both] * 8, slow=1)  # what it published may be old
    again = ((2, *IN_GATHER[1:]), IN_REDUCE)
    assert not _verdicts(*[both] * 4, *[again] * 4)  # not the wait that was seen first
    assert set(_verdicts(*[both] * 4, *[again] * 5)) == {0, 1}
    assert not _verdicts(*[both] * 4, (None, IN_REDUCE), *[both] * 4)


def test_of_many_ranks_those_that_wait_in_vain_are_told() -> None:
    gone_on: Waiting = (1, None, {"0/gather": 8, "0/reduce": 4})
    found = _verdicts(*[(IN_GATHER, gone_on, *[IN_GATHER] * 500, IN_REDUCE, None)] * 5)
    assert set(found) == {0, *range(2, 503)}
    assert "while rank 502 does" in found[2]


def _one_rank_is_late(call: str) -> None:
    """Rank 2 is late for a call in which not every rank waits for every other one."""
    deadlock.PERIOD_S = 0.05
    rank = join()
    engine, *_ = zlaunch.initialize(model=net(), config=options())
    tokens = batches(1, 6)[0].chunk(3)[rank]
    engine.backward(loss_of(engine, tokens))
    engine.step()
    tensor = torch.ones(1)
    if rank == 2:
        time.sleep(2)
    if call == "gather":
        torch.distributed.gather(tensor, [torch.empty(1) for _ in range(3)] if rank == 0 else None)
    elif rank == 2:
        torch.distributed.send(tensor, 0)
    elif rank == 0:
        torch.distributed.recv(tensor, 2)
    engine.backward(loss_of(engine, tokens))
    engine.step()


@pytest.mark.parametrize("call", ["gather", "recv"])
def test_a_late_rank_is_no_deadlock_where_another_one_waits_for_it_alone(call: str) -> None:
    run_workers(_one_rank_is_late, 3, call)


class _CountingStore(HashStore):
    """Counts requests, as rank 0's store would get them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def set(self, *arguments: Any) -> None:
        self.requests += 1
        super().set(*arguments)

    def get(self, *arguments: Any) -> bytes:
        self.requests += 1
        return super().get(*arguments)

    def check(self, *arguments: Any) -> bool:
        self.requests += 1
        return super().check(*arguments)

    def add(self, *arguments: Any) -> int:
        self.requests += 1
        return super().add(*arguments)


def test_the_requests_of_a_look_do_not_grow_with_the_square_of_the_ranks() -> None:
    store, watches = _CountingStore(), list[DeadlockWatch]()
    for rank in range(64):
        waits = Waits()
        waits.main = threading.get_ident()
        waits.now = (1, REDUCE, "reduces b") if rank == 63 else (1, GATHER, "gathers a")
        waits.started = {"0/gather": 7, "0/reduce": 4} if rank == 63 else {"0/gather": 8, "0/reduce": 3}
        watches.append(DeadlockWatch(waits, rank, 64, store))
    told: dict[int, str] = {}
    for _ in range(8):
        store.requests = 0
        verdicts = [watch.look() for watch in watches]
        assert store.requests <= 6 * 64 + 1  # rank 0 also asks how many are blocked
        told |= {rank: verdict for rank, verdict in enumerate(verdicts) if verdict is not None}
    assert set(told) == set(range(64))
    assert told[5].startswith("rank 5 is deadlocked: it gathers a") and "while rank 63 reduces b" in told[5]
    for watch in watches:
        watch._waits.now = None
        assert watch.look() is None
    store.requests = 0
    watches[0].look()
    assert store.requests == 1  # nobody is blocked: rank 0 asks for their number only


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
