"""Test process groups that end right after a collective."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zlaunch
from tests.runtime.workers import run_workers
from zlaunch.runtime.comm.process_group import new_group

ROUNDS = 30


def _threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def _end_at_once() -> int:
    """The group's threads run when this one sleeps, and get the interpreter's lock when it gives that up."""
    sys.setswitchinterval(60)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    zlaunch.init_distributed()
    for _ in range(ROUNDS):
        before = _threads()
        group = new_group([0, 1])
        for thread in _threads() - before:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group
    return ROUNDS


def test_a_group_ends_while_its_thread_frees_the_tensors() -> None:
    assert run_workers(_end_at_once, 2) == [ROUNDS, ROUNDS]


ALONE = """
import os, torch, torch.distributed as dist, zlaunch
from zlaunch.runtime.comm.process_group import new_group

zlaunch.init_distributed()
total = torch.ones(1)
dist.all_reduce(total, group=new_group([0]))
dist.barrier()
print(dist.get_world_size(), total.item(), os.environ.get("GLOO_SOCKET_IFNAME"))
"""


@pytest.mark.rotated
def test_a_world_of_one_process_leaves_no_trace_in_the_environment() -> None:
    """Jobs that the process launches later get its environment: `lo` would keep their nodes apart."""
    env = {name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", "RANK")}
    done = subprocess.run([sys.executable, "-c", ALONE], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1 1.0 None\n"


def _timeouts() -> list[float]:
    """Return the timeouts in seconds of the groups of an engine, and of one that asks for another."""
    zlaunch.init_distributed(timeout=timedelta(seconds=77))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=config)
    asked = new_group([0, 1], timeout=timedelta(seconds=5))
    groups = [dist.group.WORLD, engine.comm._world.reduce_group, asked]
    cpu = torch.device("cpu")
    found = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups if group]
    engine.destroy()
    return found


def test_the_timeout_that_a_script_asks_for_holds_for_all_groups() -> None:
    assert run_workers(_timeouts, 2) == [[77.0, 77.0, 5.0]] * 2


def _groups_beside_a_bound_world() -> list[object]:
    """Return whether this rank is in each group, the sums in its own, and the world's device afterwards."""
    zlaunch.init_distributed()
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda", 1)
    world.bound_device_id = device
    groups = [new_group(ranks) for ranks in ([0], [1, 2], [0, 1, 2])]
    with pytest.raises(ValueError, match="rank"):
        new_group([7])
    bound = world.bound_device_id
    # Collectives of this CPU world need no device.
    world.bound_device_id = None
    found: list[object] = []
    for group in groups:
        total = torch.ones(1)
        if isinstance(group, dist.ProcessGroup):
            assert group.bound_device_id == device
            dist.all_reduce(total, group=group)
            found.append(total.item())
        else:
            found.append(None)
    return [*found, bound == device]


def test_a_group_is_made_without_ranks_outside_of_it_where_the_world_has_a_device() -> None:
    """torch splits the communicator of such a world for each group, which waits for all of its ranks."""
    found = run_workers(_groups_beside_a_bound_world, 3)
    assert found[0] == [1.0, None, 3.0, True]
    assert found[1] == found[2] == [None, 2.0, 3.0, True]
