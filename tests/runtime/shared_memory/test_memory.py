"""Test the transport between CPU ranks of one machine, and what the runtime relies on it for."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import zlaunch
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.comm.collectives import Comm
from zlaunch.runtime.comm.shared_memory import SharedMemory, connect
from zlaunch.runtime.errors import PeerLost

ALONE = {"ZLAUNCH_SHARED_MEMORY": "0"}


def _comm() -> Comm:
    return Comm(zlaunch.init_distributed(), connect=connect)


def _value(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _collectives() -> list[bool]:
    """Every collective against the sum or concatenation of what the ranks are known to hold."""
    comm = _comm()
    w, r, s = comm.world_size, comm.rank, 1000
    checks = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        every = [_value(i, w * s, dtype) for i in range(w)]
        mine = comm.empty(w * s, dtype).copy_(every[r])
        total = torch.zeros(w * s, dtype=torch.float64)
        for other in every:
            total += other.double()
        rtol, atol = (1e-5, 1e-5) if dtype != torch.bfloat16 else (2e-2, 5e-2)

        wide = torch.promote_types(dtype, torch.float32)
        shard = torch.full((s,), 7.0, dtype=wide)
        comm.reduce_scatter(shard, mine).wait()
        checks.append(torch.allclose(shard.double(), total[r * s : (r + 1) * s], rtol, atol))
        checks.append(torch.equal(mine, every[r]))

        full = torch.empty(w * s, dtype=dtype)
        home = comm.empty(s, wide).copy_(every[r][:s])
        comm.all_gather(full, home).wait()
        checks.append(torch.equal(full, torch.cat([other[:s] for other in every])))

        comm.all_reduce(mine).wait()
        checks.append(torch.allclose(mine.double(), total, rtol, atol))
        comm.drain()
        comm.reduce_scatter(mine[r * s : (r + 1) * s], mine.copy_(every[r])).wait()
        checks.append(
            torch.allclose(mine[r * s : (r + 1) * s].double(), total[r * s : (r + 1) * s], rtol, atol)
        )
        comm.drain()
    return checks


@pytest.mark.parametrize("env", [{}, ALONE], ids=["shared", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_give_sums_and_concatenations(world_size: int, env: dict[str, str]) -> None:
    for checks in run_workers(_collectives, world_size, env=env):
        assert len(checks) == 15 and all(checks), checks


def _which() -> bool:
    return _comm().shared


def test_it_can_be_switched_off() -> None:
    assert run_workers(_which, 2) == [True, True]
    assert run_workers(_which, 2, env=ALONE) == [False, False]


def _many_at_once() -> bool:
    """More collectives than a socket holds messages, started by both ranks before either reads."""
    comm = _comm()
    count = 1500
    sources = [comm.empty(8, torch.float32).fill_(comm.rank * count + i) for i in range(count)]
    fulls = [torch.empty(16) for _ in sources]
    pending = [comm.all_gather(full, source) for full, source in zip(fulls, sources, strict=True)]
    for each in reversed(pending):
        each.wait()
    comm.drain()
    return all(full.tolist() == [float(i)] * 8 + [float(count + i)] * 8 for i, full in enumerate(fulls))


def test_more_under_way_than_the_sockets_hold() -> None:
    assert run_workers(_many_at_once, 2) == [True, True]


def _large() -> bool:
    """More than one chunk of address space; pages that nobody writes cost nothing."""
    comm = _comm()
    huge = comm.empty(300_000_000, torch.float32)
    small = comm.empty(4, torch.float32).fill_(comm.rank)
    full = torch.empty(8)
    comm.all_gather(full, small).wait()
    comm.drain()
    return huge.numel() == 300_000_000 and full.tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.exhaustive
def test_more_than_one_chunk() -> None:
    assert run_workers(_large, 2) == [True, True]


def _one_is_killed() -> None:
    """A hung-up connection is noticed as such: a wait that came to its limit has another message."""
    comm = _comm()
    bucket = comm.empty(8, torch.float32).fill_(1.0)
    comm.reduce_scatter(torch.empty(4), bucket).wait()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.reduce_scatter(torch.empty(4), bucket).wait()
    except PeerLost as error:
        os._exit(0 if "rank 1 exited" in str(error) else 3)
    os._exit(4)


def test_a_killed_rank_is_noticed_and_named() -> None:
    with pytest.raises(AssertionError, match=r"workers ended with \[0, -9\]"):
        run_workers(_one_is_killed, 2)


def _is_killed_in_a_forward_pass() -> None:
    """The error of rank 0 is the first that its console shows."""
    zlaunch.init_distributed()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    zero = {"stage": 3, "stage3_module_granularity_threshold": 0, "stage3_param_persistence_threshold": 0}
    zero["stage3_prefetch_bucket_size"] = 0
    given = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine, *_ = zlaunch.initialize(model=model, config=given)
    if dist.get_rank() == 1:
        model[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine(torch.ones(2, 64))
        except PeerLost as error:
            os._exit(3 if caught else 0 if "rank 1 exited" in str(error) else 4)
    os._exit(5)


def test_a_killed_rank_is_the_only_error_of_a_forward_pass() -> None:
    with pytest.raises(AssertionError, match=r"workers ended with \[0, -9\]"):
        run_workers(_is_killed_in_a_forward_pass, 2)


def _leaves_early() -> list[float]:
    """Rank 1 has announced its part and hung up when rank 2 still waits for rank 0's."""
    comm = _comm()
    source = comm.empty(4, torch.float32).fill_(comm.rank)
    full = torch.zeros(4 * comm.world_size).fill_(-1.0)
    full[4 * comm.rank : 4 * comm.rank + 4] = source
    if comm.rank == 0:
        time.sleep(1.0)
    pending = comm.all_gather(full, source)
    if comm.rank != 1:
        pending.wait()
    assert comm.link.shared is not None
    comm.link.shared.close()
    return full[::4].tolist()


def test_a_rank_may_leave_when_it_has_announced_its_part() -> None:
    first, _, third = run_workers(_leaves_early, 3)
    assert first == third == [0.0, 1.0, 2.0]


def _one_rank_goes_on_alone(stage: int) -> list[float]:
    """Rank 0 evaluates and changes the parameters while rank 1 waits at a barrier."""
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 4))
    train_engine(engine, batches(2, 8))
    if dist.get_rank() == 0:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)
    dist.barrier()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)
    return [float(p.detach().double().sum()) for p in engine.module.parameters()]


@pytest.mark.parametrize("env", [{}, ALONE], ids=["shared", "gloo"])
def test_a_rank_may_use_whole_parameters_alone(env: dict[str, str]) -> None:
    for stage in (0, 1, 2):
        first, second = run_workers(_one_rank_goes_on_alone, 2, stage, env=env)
        assert first == second


def _rounds(world: int) -> list[list[float]]:
    """The same training twice over."""
    zlaunch.init_distributed()
    results = []
    for _ in range(2):
        engine, *_ = zlaunch.initialize(model=net(), config=config(2, 4))
        train_engine(engine, batches(5, 4 * world))
        results.append([float(p.detach().double().sum()) for p in engine.module.parameters()])
        engine.destroy()
    return results


def test_results_do_not_depend_on_who_is_first() -> None:
    outcomes = run_workers(_rounds, 3, 3)
    assert all(one == two == outcomes[0][0] for one, two in outcomes)


def test_what_the_check_receives_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check advances what others wait for, which may take the message that this wait is for."""
    came: list[int] = []
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        memory = SharedMemory(0, {1: near}, 300.0, lambda *_: "", check=lambda: came.append(1))

        def block(timeout: float) -> None:
            raise AssertionError("it waits for a message that has come")

        monkeypatch.setattr(memory._selector, "select", block)
        memory.drive(lambda: set() if came else {1})
        memory.close()
