"""Reads environment variables; no other module of the runtime does."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Environment:
    """Holds a process's place in the run and its settings, from variables of torchrun, zlaunch and SLURM."""

    rank: int
    local_rank: int
    """Numbers this rank's device; 0 on every rank with torchrun's --virtual-local-rank."""
    world_size: int
    local_world_size: int
    index_on_node: int
    """Index of this rank on its node."""
    has_rendezvous: bool
    """Tells whether RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all given."""
    run_dir: str | None
    event_fd: int | None
    stop_asked: bool
    """``ZLAUNCH_STOP_ASKED=1``: "save and stop" was asked before the handlers were installed."""
    term_saves: bool
    """``ZLAUNCH_TERM_SAVES=1``: SIGTERM leaves time to save and means "save and stop" too."""
    resume_dir: str | None
    """``ZLAUNCH_RESUME_DIR``: the folder where the run that this one continues has saved."""
    array_task: str | None
    """``SLURM_ARRAY_TASK_ID``: the number of this task of a job array."""
    world_sizes: str
    """``ZLAUNCH_WORLD_SIZES``: the numbers of ranks that the run may have; see ``world_sizes.py``."""
    first_batches: str
    """``ZLAUNCH_FIRST_BATCHES``: the global batch of each engine of the run's first attempt, as ``6 12``."""
    memory_dir: str | None
    """``ZLAUNCH_MEMORY_DIR``: a folder in the node's memory that outlives the workers, but not the run."""
    shared_memory: bool
    """``ZLAUNCH_SHARED_MEMORY=0``: CPU ranks of one machine communicate over gloo alone."""
    saved_tensor_hooks: bool
    """``ZLAUNCH_SAVED_TENSOR_HOOKS=0``: no hooks on what autograd saves; see ``zero.saved_tensors``."""
    kernels: str
    """``ZLAUNCH_KERNELS``: ``auto``, ``cupy`` or ``torch``; see ``cuda_ops.loader.set_mode``."""
    quiet: bool
    """``ZLAUNCH_QUIET=1``: warnings and errors are printed, information is not."""
    verbose: bool
    """``ZLAUNCH_VERBOSE=1``: details of the start are printed as well."""
    profile: str
    """``ZLAUNCH_PROFILE=10-12``: the steps of which rank 0 writes a trace."""
    memory_plan: str
    """``ZLAUNCH_MEMORY_PLAN=warn``: a model that does not fit by the memory plan is trained all the same."""
    timeouts: bool
    """``ZLAUNCH_NO_TIMEOUTS=1``: ranks wait for each other without limit, because one is debugged."""
    debug_free: str
    """``ZLAUNCH_DEBUG_FREE``: ``poison`` fills resharded parameters with NaN instead of releasing memory."""


GPU_DEFAULTS = {
    # Gathers and reductions have a communicator each; without a common order two kernels could wait for each
    # other's place on the device.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    # The memory of units is given back and taken again all the time, in sizes that differ. The newer name,
    # PYTORCH_ALLOC_CONF, is unknown to torch 2.6, and in 2.9 this value has no effect under it.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of a process with a GPU that give way to the user's own: see :func:`set_gpu_defaults`."""
SAME_VARIABLE = {"PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF",)}
"""Maps a variable to its other names: what the user says under any of them counts."""


def set_gpu_defaults() -> None:
    """Set what the launcher sets for its GPU workers, in a process that another launcher has started.

    Call it before the first call of CUDA: torch reads its allocator's settings then, NCCL its own when the
    first communicator is made.
    """
    for name, value in GPU_DEFAULTS.items():
        if not any(other in os.environ for other in (name, *SAME_VARIABLE.get(name, ()))):
            os.environ[name] = value


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        return default


def read_environment() -> Environment:
    """Read the environment afresh (a notebook may set it after the import)."""
    fd = _integer("ZLAUNCH_EVENT_FD", -1)
    return Environment(
        rank=_integer("RANK", 0),
        local_rank=_integer("LOCAL_RANK", 0),
        world_size=_integer("WORLD_SIZE", _integer("OMPI_COMM_WORLD_SIZE", _integer("PMI_SIZE", 1))),
        local_world_size=_integer("LOCAL_WORLD_SIZE", _integer("LOCAL_SIZE", 1)),
        index_on_node=_integer("ZLAUNCH_LOCAL_RANK", _integer("LOCAL_RANK", 0)),
        has_rendezvous=all(os.environ.get(k) for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        run_dir=os.environ.get("ZLAUNCH_RUN_DIR") or None,
        event_fd=fd if fd >= 0 else None,
        stop_asked=os.environ.get("ZLAUNCH_STOP_ASKED") == "1",
        term_saves=os.environ.get("ZLAUNCH_TERM_SAVES") == "1",
        resume_dir=os.environ.get("ZLAUNCH_RESUME_DIR") or None,
        array_task=os.environ.get("SLURM_ARRAY_TASK_ID") or None,
        world_sizes=os.environ.get("ZLAUNCH_WORLD_SIZES", ""),
        first_batches=os.environ.get("ZLAUNCH_FIRST_BATCHES", ""),
        memory_dir=os.environ.get("ZLAUNCH_MEMORY_DIR") or None,
        shared_memory=os.environ.get("ZLAUNCH_SHARED_MEMORY", "1") != "0",
        saved_tensor_hooks=os.environ.get("ZLAUNCH_SAVED_TENSOR_HOOKS", "1") != "0",
        kernels=os.environ.get("ZLAUNCH_KERNELS") or "auto",
        quiet=os.environ.get("ZLAUNCH_QUIET") == "1",
        verbose=os.environ.get("ZLAUNCH_VERBOSE") == "1",
        profile=os.environ.get("ZLAUNCH_PROFILE", ""),
        memory_plan=os.environ.get("ZLAUNCH_MEMORY_PLAN", ""),
        timeouts=os.environ.get("ZLAUNCH_NO_TIMEOUTS") != "1",
        debug_free=os.environ.get("ZLAUNCH_DEBUG_FREE", ""),
    )
