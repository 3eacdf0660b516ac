"""Prints the plan of a rank's memory before anything is allocated, and ends a run that cannot fit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ...cuda_ops.narrow_state import STATE_BYTES
from ...cuda_ops.step import needs_kernel
from ..comm.collectives import Comm
from ..comm.nodes import kept_bytes
from ..environment import read_environment
from ..errors import MemoryPlanError
from ..host_memory import host_bytes
from ..log import detail, say, warn
from ..offload.manager import OffloadOptions, mean_state_count
from ..optim.registry import error_bytes, steps_elements
from ..precision import Precision
from ..zero import placeholder
from ..zero.policy import Block, ShardingOptions
from ..zero.unit import owner_of
from .activations import activations_per_token
from .estimate import Amounts, Setting, check, describe, nccl_bytes, plan, shown_bytes

# -- resources --------------------------------------------------------------------------------------
#
# Measures how much memory and disk one rank may take.


def available(device: torch.device, offload: OffloadOptions, local_world_size: int) -> Amounts:
    """Return the free bytes for one of ``local_world_size`` ranks on this machine.

    ``disk`` is what the optimizer's drive has, else the parameters' drive; 0 where no path is given.
    """
    free = 0
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    path = offload.optimizer_path or offload.parameters_path
    return Amounts(
        device=free,
        host=host_bytes() // local_world_size,
        disk=_free_on(path) // local_world_size if path else 0,
    )


def other_drive_bytes(offload: OffloadOptions, local_world_size: int) -> int | None:
    """Return the free bytes for the parameters where their drive is not the optimizer's, else None."""
    one = offload.optimizer_path
    other = offload.parameters_path
    if not one or not other or os.stat(_existing(one)).st_dev == os.stat(_existing(other)).st_dev:
        return None
    return _free_on(other) // local_world_size


def _existing(path: str) -> Path:
    folder = Path(os.path.expanduser(path)).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _free_on(path: str) -> int:
    return shutil.disk_usage(_existing(path)).free


# -- preflight --------------------------------------------------------------------------------------


_OVERRIDE = (
    'If the memory of this machine is read wrongly, set "memory_plan": "warn" in the config, or '
    "ZLAUNCH_MEMORY_PLAN=warn."
)


def preflight(
    blocks: Sequence[Block],
    options: ShardingOptions,
    offload: OffloadOptions,
    optimizer: torch.optim.Optimizer | None,
    precision: Precision,
    comm: Comm,
    accumulates: bool,
    *,
    snapshots: int,
    kept_snapshots: int,
    model: nn.Module,
    grad_bytes: int = 4,
    steps_in_backward: bool = False,
    is_enforced: bool = True,
    prefetch_numel: int = 0,
) -> tuple[Setting, Amounts]:
    """Print the plan on rank 0; return what it has counted and what a rank may take. Collective.

    Args:
        grad_bytes: Bytes of a gradient's element at rest.
        is_enforced: Whether a plan that does not fit is an error. If not, rank 0 prints a warning.
        prefetch_numel: Elements that stage 3 gathers ahead.

    Raises:
        MemoryPlanError: on every rank, if the plan is enforced and does not fit on one of them.
    """
    parameters = [parameter for block in blocks for _, parameter in block.parameters]
    trainable = _numels(blocks, trainable=True)
    widest = max((p.dtype.itemsize for p in parameters), default=4)
    stage = options.shard_optimizer + options.shard_grads + options.shard_params
    dtype_bytes = precision.dtype.itemsize if precision.dtype is not None else widest
    setting = Setting(
        stage=stage,
        world_size=comm.link.shards,
        copy_shards=comm.link.size if comm.link.size < comm.link.shards else 0,
        kept_for_links=kept_bytes(comm.link, sum(trainable), dtype_bytes)
        + error_bytes(optimizer, sum(trainable), stage, comm.world_size),
        blocks=trainable,
        experts=sum(
            placeholder.shape_of(p).numel()
            for p in parameters
            if p.requires_grad and comm.find_shard_link(p)[0] is comm.experts
        ),
        expert_shards=comm.experts.size if comm.experts is not None else 1,
        frozen_blocks=_numels(blocks, trainable=False),
        dtype_bytes=dtype_bytes,
        states=mean_state_count(optimizer, lambda parameter: placeholder.shape_of(parameter).numel()),
        master_bytes=dtype_bytes if offload.narrow_masters else 4,
        state_bytes=_state_bytes(optimizer),
        grad_bytes=grad_bytes,
        offload=offload,
        trains=optimizer is not None,
        accumulates=accumulates,
        device_is_host=comm.device.type == "cpu",
        snapshots=snapshots,
        kept_snapshots=kept_snapshots,
        steps_in_backward=steps_in_backward,
        can_step_in_backward=_can_step_in_backward(optimizer, offload, precision, comm, accumulates),
        can_narrow=_can_narrow(optimizer),
        is_bf16=precision.dtype is torch.bfloat16,
        prefetch_numel=prefetch_numel,
    )
    local = read_environment().local_world_size
    free = available(comm.device, offload, local)
    # The model's present values are given back as they are taken over. NCCL allocates the buffers of a
    # communicator with its first collective, which is still to come.
    in_host, on_device = _present(parameters, comm)
    reserved = 0
    if comm.device.type == "cuda":
        reserved = nccl_bytes(comm.mesh, has_shard_groups=comm.link.size < comm.data.size)
    free = replace(free, host=free.host + in_host, device=max(0, free.device + on_device - reserved))
    stages = comm.exchange(setting) if comm.mesh.pipeline > 1 else [setting]
    largest = max(stages, key=lambda each: plan(each).total.device)
    if comm.rank == 0:
        on_cpu = comm.device.type == "cpu"
        present = Amounts(device=in_host if on_cpu else on_device, host=0 if on_cpu else in_host)
        # a stage keeps as many micro-batches as there are stages, in as much less of the layers
        mesh = comm.mesh
        of_token = activations_per_token(model, setting.dtype_bytes, mesh.sequence, mesh.tensor)
        summary, *details = describe(largest, free, present, of_token)
        say(summary)
        for line in details:
            detail(line)
        if reserved:
            detail(f"reserved for NCCL's buffers: {shown_bytes(reserved)} of GPU memory per rank (assumed)")
    problem = None
    try:
        check(setting, free, other_drive_bytes(offload, local))
    except MemoryPlanError as error:
        problem = str(error)
    answers = comm.exchange((problem, is_enforced))
    # ZLAUNCH_MEMORY_PLAN may be set on some nodes only: all ranks train, or none.
    is_enforced = all(enforced for _, enforced in answers)
    for rank, (text, _) in enumerate(answers):
        if text is not None and is_enforced:
            less = f"{shown_bytes(reserved)} of GPU memory are reserved for NCCL. " if reserved else ""
            raise MemoryPlanError(f"rank {rank}: {text} {less}{_OVERRIDE}")
        if text is not None and comm.rank == 0:
            warn(f"rank {rank}: {text} Training all the same, as memory_plan asks for")
    return setting, free


def _numels(blocks: Sequence[Block], *, trainable: bool) -> list[int]:
    """Count the elements of each block that require gradients, or the others."""
    return [
        sum(placeholder.shape_of(p).numel() for _, p in block.parameters if p.requires_grad is trainable)
        for block in blocks
    ]


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> float:
    """Return the bytes of a state's element, in the mean over the parameters."""
    total = 0.0
    numel = 0
    for group in [] if optimizer is None else optimizer.param_groups:
        count = sum(placeholder.shape_of(p).numel() for p in group["params"])
        total = total + count * STATE_BYTES[group.get("state_dtype") or "fp32"]
        numel = numel + count
    return total / numel if numel else STATE_BYTES["fp32"]


def _can_step_in_backward(
    optimizer: torch.optim.Optimizer | None,
    offload: OffloadOptions,
    precision: Precision,
    comm: Comm,
    accumulates: bool,
) -> bool:
    """Tell whether units could be stepped inside the backward pass."""
    is_plain = comm.mesh.axes.keys() <= {"data"} and not offload.any and not accumulates
    may_skip = precision.scaler.dynamic or precision.dtype is torch.float16
    return is_plain and not may_skip and steps_elements(optimizer)


def _can_narrow(optimizer: torch.optim.Optimizer | None) -> bool:
    """Tell whether the optimizer's state may have fewer than 32 bits an element."""
    try:
        return optimizer is not None and all(
            needs_kernel(optimizer, {**group, "state_dtype": "int8"}, torch.float32)
            for group in optimizer.param_groups
        )
    except ValueError:
        return False


def _present(parameters: Sequence[nn.Parameter], comm: Comm) -> tuple[int, int]:
    """Return the bytes that the model holds now, in host memory and on the GPU; a parameter built in
    ``zero.Init`` counts with this rank's slice.
    """
    in_host = on_device = 0
    for parameter in parameters:
        unit = owner_of(parameter)
        nbytes = placeholder.shape_of(parameter).numel() * parameter.dtype.itemsize
        place = parameter.device.type
        if unit is not None:
            nbytes //= comm.world_size
            place = "disk" if unit.values.tensor is None else unit.values.tensor.device.type
        if place == "cuda":
            on_device += nbytes
        elif place == "cpu" and (comm.device.type == "cpu" or unit is not None):
            in_host += nbytes
    return in_host, on_device
