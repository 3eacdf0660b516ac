"""Sets up torch.distributed, makes process groups, and ends them at the end of the process."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from ..environment import read_environment, set_gpu_defaults
from ..threads import choose_device
from .pending import waits

_CPU = torch.device("cpu")
_backends: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""Maps each group to its gloo part, which has to end after the group itself."""


open_comms: WeakSet[Any] = WeakSet()
"""Holds every ``Comm`` that has not been closed, to be closed before the process ends."""


def running_comm() -> Any:
    """Return the communicator of the engine whose forward or backward pass is going on: of several passes,
    one inside the other, the innermost. None outside of all passes.
    """
    since = {comm: comm.current_pass_id() for comm in open_comms}
    running = [comm for comm, began in since.items() if began]
    return max(running, key=lambda comm: since[comm], default=None)


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | None = None,
) -> torch.device:
    """Set up torch.distributed from the environment, once; without one, the world is this process.

    Args:
        dist_backend: ``"nccl"``, ``"gloo"``, or None: NCCL on GPUs (and gloo for CPU tensors), gloo on the
            CPU.
        timeout: Timeout of torch.distributed's collectives; None is torch's default.

    Returns:
        This rank's device.

    Raises:
        RuntimeError: Ranks would share a GPU, or the environment is incomplete.
    """
    environment = read_environment()
    device = torch.device("cpu")
    if torch.cuda.is_available() and dist_backend != "gloo":
        count = torch.cuda.device_count()
        index = environment.local_rank if count > 1 else 0
        if index >= count:
            raise RuntimeError(f"local rank {environment.local_rank} has no GPU: this process sees {count}")
        # A launcher gives each rank all GPUs, or by this variable a single one.
        if count == 1 and environment.local_world_size > 1 and not os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise RuntimeError(
                f"{environment.local_world_size} ranks would share the machine's only GPU, which NCCL does "
                "not allow: start one worker, or set CUDA_VISIBLE_DEVICES='' to train on the CPU"
            )
        device = torch.device("cuda", index)
        set_gpu_defaults()
        choose_device(device)
    if not dist.is_initialized():
        options: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
        if device.type == "cuda":
            options["device_id"] = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if dist_backend not in (None, "nccl"):  # NCCL is for GPU tensors only
            backend = str(dist_backend)
        if environment.has_rendezvous:
            dist.init_process_group(backend, **options)
        elif environment.world_size > 1:
            raise RuntimeError(
                f"this process is one of {environment.world_size} ranks, but RANK, WORLD_SIZE, MASTER_ADDR "
                "or MASTER_PORT is not set: start with zlaunch or torchrun"
            )
        else:
            # in this process's memory: a port on the loopback interface could be taken before torch binds it
            with _loopback():
                store = dist.HashStore()  # type: ignore[attr-defined]  # documented, and not in its __all__
                dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
        atexit.register(end_process)
    ends_well(dist.group.WORLD)
    return device


@contextmanager
def _loopback() -> Iterator[None]:
    """Have gloo take the loopback interface: the address of the host's name may not be this machine's.

    The variable is unset afterwards: this process's environment is also that of the jobs it launches, whose
    nodes would then connect to themselves.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def world_timeout() -> timedelta | None:
    """Return the timeout of all ranks' collectives, which the script may have set; None if unknown."""
    world = dist.group.WORLD
    assert world is not None
    # NCCL's where there is a GPU.
    device = max(world._device_types, key=lambda each: each.type != "cpu")
    backend = world._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def new_group(ranks: list[int], **options: Any) -> Any:
    """Make a group of some ranks. All ranks of the world call this in one order; the group's own wait for
    each other, and no ProcessGroup is returned to the others.

    Its timeout is the world's by default. torch's own default would ignore what the script has asked for.
    """
    options.setdefault("timeout", world_timeout())
    with _loopback() if dist.get_world_size() == 1 else nullcontext(), _unbound_world() as device:
        group = dist.new_group(ranks, **options)
    if isinstance(group, dist.ProcessGroup):
        if device is not None:
            _connect(group, device)
        ends_well(group)
    return group


@contextmanager
def _unbound_world() -> Iterator[torch.device | None]:
    """Take the world's GPU from it while a group is made; yield the GPU, or None if it has none.

    Where the world has one, torch splits the world's NCCL communicator for each group, and that waits for all
    ranks, also for those outside of the group. 512 ranks with tensor 8 and pipeline 4 make some 450 groups,
    of which a rank is in five: it would wait 450 times. A communicator that is not split joins its own ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make a group's NCCL communicator now. Otherwise the first collective would: its ranks would wait for
    each other where none of them waits for a result, and the report of a hang would not name them.
    """
    group.bound_device_id = device
    backend = group._get_backend(device)
    if backend.name() == "nccl":
        backend.eager_connect_single_device(device)


def ends_well(group: dist.ProcessGroup | None) -> None:
    """Let the group end safely right after a collective.

    Gloo's end waits for its threads, one of which may be about to release the collective's tensors, for which
    it needs the interpreter's lock. In torch 2.6 a group keeps that lock when it takes its gloo part with it;
    that part gives it up when it goes by itself.
    """
    if group is not None and _CPU in group._device_types:
        _backends[group] = group._get_backend(_CPU)


def end_process() -> None:
    """Release every communicator at the end of this process.

    After an error this does not wait: a collective that this rank has begun may never end.
    """
    # Set when an exception has ended the script: by the interpreter, or by the worker's bootstrap.
    if getattr(sys, "last_value", None) is None:
        close_all()
    else:
        waits.stop_watch()
        _abort()


def close_all() -> None:
    """Release every communicator of this process.

    Threads of a process group that is still alive while the interpreter is torn down can abort the process.
    """
    # First, because its thread uses the store of the default group.
    waits.stop_watch()
    # Their groups end before the default group, from whose store they were made.
    for comm in list(open_comms):
        comm.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _abort() -> None:
    """End NCCL's communicators at once. gloo's end with the process: destroying one waits for it."""
    if not dist.is_initialized() or not dist.is_nccl_available():
        return
    device = torch.device("cuda")
    backends = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has none for GPUs
            backend = group._get_backend(device)
            backends += [backend] if isinstance(backend, dist.ProcessGroupNCCL) else []
    if backends:
        backends[0]._group_start()  # or one would wait for the other
        for backend in backends:
            backend.abort()
        backends[0]._group_end()
