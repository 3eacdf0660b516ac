"""The plan of a rank's memory, said before anything is allocated, and the end of a run that cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .available import available
from .comm import Comm
from .environment import read_environment
from .memory import Amounts, MemoryPlanError, Setting, check, describe
from .offload.place import OffloadOptions
from .precision import Precision
from .zero import guards
from .zero.partition import Block, ShardingOptions


def foresee(
    blocks: Sequence[Block],
    options: ShardingOptions,
    offload: OffloadOptions,
    optimizer: torch.optim.Optimizer | None,
    precision: Precision,
    comm: Comm,
) -> Amounts:
    """Print the plan on rank 0 and return what a rank may take. Raises MemoryPlanError on every rank if the
    plan does not fit on one of them. Collective.
    """
    parameters = [parameter for block in blocks for _, parameter in block.parameters]
    trainable = [sum(p.numel() for _, p in block.parameters if p.requires_grad) for block in blocks]
    widest = max((p.dtype.itemsize for p in parameters), default=4)
    stage = options.shard_optimizer + options.shard_grads + options.shard_params
    setting = Setting(
        stage=stage,
        world_size=comm.world_size,
        blocks=trainable,
        frozen=sum(p.numel() for p in parameters) - sum(trainable),
        dtype_bytes=precision.dtype.itemsize if precision.dtype is not None else widest,
        states=offload.state_count,
        offload=offload,
        trains=optimizer is not None,
        device_is_host=comm.device.type == "cpu",
    )
    free = available(comm.device, offload, read_environment().local_world_size)
    # the model's present values are given back as they are taken over
    present = sum(p.numel() * p.dtype.itemsize for p in parameters if guards.owner(p) is None)
    if comm.device.type == "cpu":
        free = replace(free, host=free.host + present)
    if comm.rank == 0:
        print(f"zlaunch: {describe(setting, free)}", flush=True)
    problem = None
    try:
        check(setting, free)
    except MemoryPlanError as error:
        problem = str(error)
    for rank, text in enumerate(comm.exchange(problem)):
        if text is not None:
            raise MemoryPlanError(f"rank {rank}: {text}")
    return free
