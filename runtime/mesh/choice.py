"""Chooses the ranks that units are sharded over from a config, the nodes and the speed of the links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..comm.collectives import Comm
from ..comm.link import Link
from ..comm.peer_memory import PeerMemory
from ..comm.pending import exchange_objects
from ..config import Config, ConfigError
from ..log import say
from .topology import Mesh, divide, find_nodes
from .two_hops import TwoHops

_BYTES, _BYTES_ON_GPU = 1 << 20, 1 << 24
_REPEATS = 3
_SLOWER = 0.7
"""Gathers stay in the node where the links between nodes have less than this part of its bandwidth."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Says which ranks units are sharded over, as a config asks."""

    key: str
    size: int | str
    """A number of ranks, or ``"node"`` or ``"auto"``."""
    over_all: bool
    """Tells that units are sharded over all ranks, and copies of them over the group (ZeRO++ hpZ)."""


def find_shard_group(config: Config) -> ShardGroup | None:
    """Return the group that a config asks for; None for all ranks. Raises ConfigError where it asks twice."""
    zero, found = config.zero_optimization, []
    if zero.mics_shard_size > 0:
        found.append(ShardGroup("zero_optimization.mics_shard_size", zero.mics_shard_size, False))
    if zero.zero_hpz_partition_size > 1:
        found.append(
            ShardGroup("zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size, True)
        )
    if zero.shard_group != "world":
        chosen = zero.shard_group
        found.append(ShardGroup("zero_optimization.shard_group", chosen, chosen == "auto"))
    if len(found) > 1:
        raise ConfigError([f"{' and '.join(each.key for each in found)} contradict each other: give one"])
    return found[0] if found else None


def make_link(wanted: ShardGroup, comm: Comm, join: Callable[..., PeerMemory | None] | None) -> Link:
    """Make the link of a communicator. Collective. Raises ConfigError on every rank."""
    nodes = find_nodes(comm.exchange)
    if wanted.size != "auto":
        mesh = divide(wanted.size, wanted.key, nodes)
    elif len(nodes) == 1 or len({len(node.ranks) for node in nodes}) > 1 or len(nodes) == comm.world_size:
        why = {1: "there is one node", comm.world_size: "each node has one rank"}.get(
            len(nodes), "the nodes have different numbers of ranks"
        )
        _tell(comm, f"units are sharded over all ranks: {why}")
        mesh = Mesh(comm.world_size, comm.world_size)
    else:
        mesh = divide("node", wanted.key, nodes)
    if mesh.count == 1:
        if join is not None:
            comm.link.shared = join(comm.rank, comm.world_size, comm.exchange)
        return comm.link
    inner = _group(comm, mesh.shard_groups())
    outer = _group(comm, mesh.replica_groups())
    if wanted.size == "auto":
        inside, between = (_bandwidth(comm, link) for link in (inner, outer))
        speeds = f"{inside / 1e9:.3g} GB/s in a node, {between / 1e9:.3g} GB/s between nodes"
        if between >= _SLOWER * inside:
            _tell(comm, f"units are sharded over all ranks: {speeds}")
            if join is not None:
                comm.link.shared = join(comm.rank, comm.world_size, comm.exchange)
            return comm.link
        _tell(comm, f"parameters are gathered inside each node: {speeds}")
    if join is not None:
        first = comm.rank - inner.position
        share = partial(
            exchange_objects,
            world_size=inner.size,
            group=inner.gather_group,
            key=(comm.number, "control", 0),
            what="joins the ranks of its node",
            over_gloo=True,
        )
        inner.shared = join(inner.position, inner.size, share, first=first) if inner.size > 1 else None
        if not all(comm.exchange(inner.shared is not None or inner.size == 1)) and inner.shared is not None:
            inner.shared.close()
            inner.shared = None
    return TwoHops(comm.link, inner, outer, over_all=wanted.over_all)


def _tell(comm: Comm, text: str) -> None:
    if comm.rank == 0:
        say(f'zero_optimization.shard_group "auto": {text}')


def _group(comm: Comm, groups: list[range]) -> Link:
    """Make the groups; return the link of the one that this rank is in. Collective."""
    found: Any = None
    for ranks in groups:
        made = [comm.new_group(ranks) for _ in range(2)]
        if comm.rank in ranks:
            found = Link(comm.device, len(ranks), ranks.index(comm.rank), *made)
    assert isinstance(found, Link)
    return found


def _bandwidth(comm: Comm, link: Link) -> float:
    """Measure the bus bandwidth of all-reduces in bytes a second (nccl-tests, doc/PERFORMANCE.md), with all
    groups at once as in training; the least of all ranks. Collective.
    """
    on_gpu = comm.device.type == "cuda"
    buffer = torch.zeros(_BYTES_ON_GPU if on_gpu else _BYTES, dtype=torch.uint8, device=comm.device)
    taken = []
    for _ in range(1 + _REPEATS):
        dist.barrier(group=link.reduce_group)
        start = time.perf_counter()
        dist.all_reduce(buffer, group=link.reduce_group)
        if on_gpu:
            torch.cuda.synchronize(comm.device)
        taken.append(time.perf_counter() - start)
    bus = 2 * (link.size - 1) / link.size * buffer.nbytes / min(taken[1:])
    return float(min(comm.exchange(bus)))
