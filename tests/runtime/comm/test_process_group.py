"""Test process groups that end right after a collective."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

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
