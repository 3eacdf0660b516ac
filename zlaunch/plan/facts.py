"""Hold the facts that a plan is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zlaunch.plan.plan import Program
from zlaunch.runtime.world_sizes import FirstBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Holds what all nodes and all attempts of a run have in common."""

    program: Program
    run_id: str
    run_dir: str
    cwd: str
    grace_s: float
    bootstrap: tuple[str, ...]
    """The command that starts a worker's bootstrap."""
    environ: Mapping[str, str]
    """Only asked which variables the user has set already, which are then left alone."""
    heartbeat_s: float = 0.0
    in_step: bool = False
    max_restarts: int = 0
    debug_rank: int | None = None
    """The rank that waits for a debugger before its script runs."""
    virtual_local_rank: bool = False
    """Each worker has LOCAL_RANK 0, and its GPU alone."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of workers that the run may have, the one without a failure first; empty: it cannot change."""
    first_batches: tuple[FirstBatch, ...] = ()
    """The engines of the first attempt; empty: this is the first."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Describes a node and the slots chosen there."""

    host: str
    workers: int
    cores: int
    devices: tuple[str, ...] = ()
    """One CUDA_VISIBLE_DEVICES token a worker; empty means CPU workers."""
    slots: tuple[int, ...] = ()
    """The number of each worker's GPU among those of the node; empty for CPU workers."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every worker of this node: what is exported to it from the launching machine."""
    bound: tuple[tuple[int, ...], ...] = ()
    """The CPUs of each worker, where they are to be bound."""
    first_local: int = 0
    """The local rank of the first of these workers, where others on the node are started by somebody else."""
    local_world: int | None = None
    """Counts the workers of the node in all; None: these."""
    python: str | None = None
    """The interpreter there; None: this one."""
    is_local: bool = True
    """Tells whether the launcher is on this node."""
