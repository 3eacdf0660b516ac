"""Chooses the ranks that units are sharded over from a config, the nodes and the speed of the links."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Config, ConfigError
from ..environment import read_environment
from ..log import say
from ..mesh import MeshShape
from .collectives import Comm
from .link import Note, RankLink
from .nvlink import find_nvlink_domain
from .pending import DONE, Pending, exchange_objects
from .shared_memory import SharedMemory
from .two_hops import UNPACKED, PackedLink, Quantization, TwoHops

# -- topology ---------------------------------------------------------------------------------------
#
# Finds out which ranks share a node, and divides the ranks into groups.
#
# Note [Nodes and NVLink domains]. What counts is where links become slower. Machines whose GPUs are in one
# NVLink domain are therefore one node here, if their ranks are consecutive.


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """Describes a node by its name and its ranks, which are consecutive."""

    name: str
    ranks: range


def find_nodes(exchange: Callable[[object], list[Any]], device: torch.device) -> list[NodeRanks]:
    """Return the nodes, in the order of their ranks. Collective. Raises ConfigError if the launcher has not
    numbered the ranks node by node.
    """
    environment = read_environment()
    place = environment.rank - environment.index_on_node, environment.local_world_size, socket.gethostname()
    found: dict[int, NodeRanks] = {}
    domains: dict[int, set[str | None]] = {}
    for rank, (first, count, name, domain) in enumerate(exchange((*place, find_nvlink_domain(device)))):
        node = found.setdefault(first, NodeRanks(name, range(first, first + count)))
        if rank not in node.ranks or node.ranks != range(first, first + count):
            raise ConfigError(
                [f"rank {rank} is on {name}, out of order: groups of ranks need ranks numbered node by node"]
            )
        domains.setdefault(first, set()).add(domain)
    nodes: list[NodeRanks] = []
    last = None
    for first, node in found.items():
        domain = domains[first].pop()
        # A machine with GPUs of several domains, or with one that is in none, is on its own.
        shared = None if domains[first] else domain
        if nodes and shared is not None and shared == last:
            before = nodes.pop()
            name = f"{before.name.partition(' to ')[0]} to {node.name}"
            nodes.append(NodeRanks(name, range(before.ranks.start, node.ranks.stop)))
        else:
            nodes.append(node)
        last = shared
    return nodes


@dataclass(frozen=True, slots=True)
class Mesh:
    """Divides the ranks into groups of ``size`` consecutive ones."""

    world_size: int
    size: int

    @property
    def count(self) -> int:
        """Return the number of groups."""
        return self.world_size // self.size

    def shard_groups(self) -> list[range]:
        """Return the groups."""
        return [range(first, first + self.size) for first in range(0, self.world_size, self.size)]

    def replica_groups(self) -> list[range]:
        """Return the ranks that have the same place in each group, for each place."""
        return [range(place, self.world_size, self.size) for place in range(self.size)]


def divide(wanted: int | str, key: str, nodes: Sequence[NodeRanks]) -> Mesh:
    """Return the mesh that a config asks for: a number of ranks, or ``"node"``.

    Raises ConfigError, with the ``key`` and the nodes, where the ranks cannot be divided so.
    """
    world_size = sum(len(node.ranks) for node in nodes)
    if wanted == "node":
        if len({len(node.ranks) for node in nodes}) > 1:
            counts = ", ".join(f"{node.name} has {len(node.ranks)}" for node in nodes)
            raise ConfigError(
                [f'{key}: "node" needs the same number of ranks on each node; {counts}. Drop ranks with '
                    "--exclude, or set a number of ranks"]
            )  # fmt: skip
        return Mesh(world_size, len(nodes[0].ranks))
    assert isinstance(wanted, int)
    fitting = [size for size in range(1, world_size + 1) if world_size % size == 0 and not _cuts(size, nodes)]
    advice = f"possible sizes: {', '.join(map(str, fitting))}"
    if world_size % wanted:
        raise ConfigError([f"{key}: {wanted} does not divide the {world_size} ranks; {advice}"])
    if _cuts(wanted, nodes):
        counts = ", ".join(f"{node.name} has {len(node.ranks)}" for node in nodes)
        raise ConfigError([f"{key}: groups of {wanted} ranks would split nodes; {counts}; {advice}"])
    return Mesh(world_size, wanted)


def _cuts(size: int, nodes: Sequence[NodeRanks]) -> bool:
    """Tell whether groups of a size have a part of a node's ranks and others: a node has to lie in one group,
    or to be made of whole groups.
    """
    return any(
        ranks[0] // size != ranks[-1] // size and (ranks.start % size > 0 or ranks.stop % size > 0)
        for ranks in (node.ranks for node in nodes)
    )


# -- stage link -------------------------------------------------------------------------------------
#
# Runs collectives of units of which this rank's part of a pipeline may have nothing.


class StageLink(RankLink):
    """Is a link whose collectives of nothing are done: units of layers that other stages have are empty."""

    def __init__(self, link: RankLink) -> None:
        super().__init__(link.device, link.size, link.position, link.gather_group, link.reduce_group)

    def all_gather(
        self, full: Tensor, source: Tensor, label: int, note: Note, rounded: bool = False
    ) -> Pending:
        """Start to fill ``full`` from every member's ``source``."""
        return super().all_gather(full, source, label, note, rounded) if full.numel() else DONE

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int, note: Note) -> Pending:
        """Start to fill ``shard`` with this rank's slice of the sum of ``bucket``."""
        return super().reduce_scatter(shard, bucket, label, note) if bucket.numel() else DONE

    def all_reduce(self, tensor: Tensor, label: int, note: Note) -> Pending:
        """Start to sum ``tensor`` over the group in place."""
        return super().all_reduce(tensor, label, note) if tensor.numel() else DONE


# -- choice -----------------------------------------------------------------------------------------


_BYTES = 1 << 20
_BYTES_ON_GPU = 1 << 24
_REPEATS = 3
GRADIENTS = "zero_quantized_gradients"
_SLOWER = 0.7
"""Gathers stay in the node where the links between nodes have less than this part of its bandwidth."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Says which ranks units are sharded over and what is quantised, as a config asks."""

    key: str
    size: int | str
    """A number of ranks, ``"node"``, ``"world"``, ``"nodes"`` (node where the nodes are equal, else world),
    or ``"auto"`` (node where they are equal and the links between them slower, else world).
    """
    over_all: bool
    """Tells that units are sharded over all ranks, and copies of them over the group (ZeRO++ hpZ)."""
    inside: Quantization = UNPACKED
    between: Quantization = UNPACKED

    def quantised_keys(self, is_alone: bool) -> dict[str, bool]:
        """Tell which keys quantise what travels inside a group, which may be the only one."""
        weights = is_alone or not self.over_all
        return {
            "zero_quantized_weights": weights and self.inside.weights,
            "zero_quantized_nontrainable_weights": weights and self.inside.frozen and not self.inside.weights,
            GRADIENTS: self.inside.gradient_bits > 0,
        }


def find_shard_group(config: Config) -> ShardGroup | None:
    """Return what a config asks for; None for all ranks, without quantisation."""
    zero = config.zero_optimization
    found = []
    if zero.mics_shard_size > 0:
        found.append(ShardGroup("zero_optimization.mics_shard_size", zero.mics_shard_size, False))
    if (copies := zero.zero_hpz_partition_size) > 1:
        found.append(ShardGroup("zero_optimization.zero_hpz_partition_size", copies, True))
    if zero.shard_group != "world":
        size = zero.shard_group
        found.append(ShardGroup("zero_optimization.shard_group", size, size == "auto"))
    weights = zero.zero_quantized_weights
    frozen = zero.zero_quantized_nontrainable_weights
    gradients = zero.zero_quantized_gradients
    loco = zero.zeropp_loco_param
    if not found and not (weights or frozen or gradients):
        return None
    inside = Quantization(weights, weights or frozen, 8 if gradients else 0)
    if loco is not None:
        inside = replace(inside, beta=loco.err_beta, reset_every=loco.reset_T)
    between = replace(inside, gradient_bits=4 if gradients else 0)
    # reductions take two hops between nodes; then gathers do, too
    alone = ShardGroup(f"zero_optimization.{GRADIENTS}", "nodes" if gradients else "world", True)
    return replace(found[0] if found else alone, inside=inside, between=between)


def make_link(
    wanted: ShardGroup | None,
    mesh: MeshShape,
    comm: Comm,
    join: Callable[..., SharedMemory | None] | None,
) -> RankLink:
    """Make the link of a communicator. Collective. Raises ConfigError on every rank.

    Where ranks of ``mesh`` share each layer, units are sharded over the ranks with the same place among
    those; where ranks have different experts, units of experts over the ranks that have the same.
    """
    comm.mesh = mesh
    if mesh.expert > 1:
        comm.experts = _group(comm, mesh.groups("data", "sequence"))
    if mesh.tensor * mesh.pipeline > 1:
        comm.data = _group(comm, mesh.groups("data", "expert", "sequence"))
    if mesh.pipeline > 1:
        comm.data = StageLink(comm.data)
        comm.experts = None if comm.experts is None else StageLink(comm.experts)
    if mesh.tensor * mesh.expert * mesh.pipeline > 1:
        return comm.data
    if wanted is None:
        return _all_ranks(comm, join)
    nodes = find_nodes(comm.exchange, comm.device)
    division = Mesh(comm.world_size, comm.world_size)
    if wanted.size in ("auto", "nodes"):
        why = _why_not(nodes)
        if why:
            _tell(comm, wanted, f"parameters are sharded over all ranks: {why}")
        else:
            division = divide("node", wanted.key, nodes)
    elif wanted.size != "world":
        division = divide(wanted.size, wanted.key, nodes)
    if division.count == 1:
        return _one_hop(wanted, comm, join)
    inner = _group(comm, division.shard_groups())
    outer = _group(comm, division.replica_groups())
    if wanted.size == "auto":
        inside, between = (_bandwidth(comm, link) for link in (inner, outer))
        speeds = f"{inside / 1e9:.3g} GB/s in a node, {between / 1e9:.3g} GB/s between nodes"
        if between >= _SLOWER * inside:
            _tell(comm, wanted, f"parameters are sharded over all ranks: {speeds}")
            return _one_hop(wanted, comm, join)
        _tell(comm, wanted, f"parameters are sharded inside each node: {speeds}")
    packed = PackedLink(inner, wanted.inside)
    if join is not None and inner.size > 1:
        _share(comm, packed, join)
        _tell_unpacked(comm, wanted, packed, is_alone=False)
    return TwoHops(comm.link, packed, PackedLink(outer, wanted.between), over_all=wanted.over_all)


def _why_not(nodes: Sequence[NodeRanks]) -> str:
    """Say why nodes cannot be groups; empty if they can."""
    if len(nodes) == 1:
        return "all are on one node, or in one NVLink domain"
    if len({len(node.ranks) for node in nodes}) > 1:
        return "the nodes have different numbers of ranks"
    return "each node has one rank" if len(nodes[0].ranks) == 1 else ""


def _one_hop(wanted: ShardGroup, comm: Comm, join: Callable[..., SharedMemory | None] | None) -> RankLink:
    """Make a link of all ranks. Collective."""
    link = _all_ranks(comm, join, wanted.inside)
    _tell_unpacked(comm, wanted, link, is_alone=True)
    return link


def _all_ranks(
    comm: Comm, join: Callable[..., SharedMemory | None] | None, packed: Quantization = UNPACKED
) -> RankLink:
    link = PackedLink(comm.link, packed) if packed.any else comm.link
    if join is not None:
        link.shared = join(comm.rank, comm.world_size, comm.exchange)
    return link


def _tell_unpacked(comm: Comm, wanted: ShardGroup, link: RankLink, *, is_alone: bool) -> None:
    """Say which quantised keys have no effect among ranks that share memory."""
    if link.shared is None or comm.rank:
        return
    why = "these ranks share memory and send nothing"
    for name, is_given in wanted.quantised_keys(is_alone).items():
        if is_given:
            effect = (
                "no effect" if is_alone or name != GRADIENTS else "quantises only between groups of ranks"
            )
            say(f"zero_optimization.{name}: {effect}: {why}")


def _share(comm: Comm, link: RankLink, join: Callable[..., SharedMemory | None]) -> None:
    """Join the ranks of each group by shared memory, if those of all groups can be. Collective."""
    exchange = partial(
        exchange_objects,
        world_size=link.size,
        group=link.gather_group,
        key=(comm.number, "control", 0),
        what="connects to the ranks of its node",
        over_gloo=True,
    )
    shared = join(link.position, link.size, exchange, first=comm.rank - link.position)
    # In all groups or in none: Comm.shared decides on all ranks how buffers are made and when ranks drain.
    if all(comm.exchange(shared is not None)):
        link.shared = shared
    elif shared is not None:
        shared.close()


def _tell(comm: Comm, wanted: ShardGroup, text: str) -> None:
    if comm.rank == 0:
        say(f"{wanted.key}: {text}")


def _group(comm: Comm, groups: Sequence[Sequence[int]]) -> RankLink:
    """Make the groups; return the link of the one that this rank is in. Collective."""
    found: Any = None
    for ranks in groups:
        # Two groups: see Note [Two channels] in link.py. Every rank makes every group, in one order, because
        # torch's new_group() is collective for all ranks.
        made = [comm.new_group(ranks) for _ in range(2)]
        if comm.rank in ranks:
            found = RankLink(comm.device, len(ranks), ranks.index(comm.rank), *made)
    assert isinstance(found, RankLink)
    return found


def _bandwidth(comm: Comm, link: RankLink) -> float:
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
    # Without the first round, which warms up.
    bus = 2 * (link.size - 1) / link.size * buffer.nbytes / min(taken[1:])
    # One number for all ranks: each has to choose the same links by it.
    return float(min(comm.exchange(bus)))


def kept_bytes(link: RankLink, trainable: int, dtype_bytes: int) -> int:
    """Estimate what a link keeps of a model to send its gradients packed: what was lost."""
    links: list[tuple[PackedLink, int]] = [(link, trainable)] if isinstance(link, PackedLink) else []
    if isinstance(link, TwoHops):
        links = [(link.inner, trainable), (link.outer, -(-trainable // link.inner.size))]
    total = 0
    for each, numel in links:
        if each.quantization.beta is not None and each.size > 1 and each.shared is None:
            total += numel * dtype_bytes
    return total


def forget_errors(link: RankLink) -> None:
    """Forget what quantisation has lost: other values follow."""
    if isinstance(link, (TwoHops, PackedLink)):
        link.forget_errors()


def drop_copies(link: RankLink) -> None:
    """Release the memory of copies until the next gather. All ranks must call it, with nothing under way."""
    if isinstance(link, TwoHops):
        link.drop_copies()


def has_groups(link: RankLink) -> bool:
    """Tell whether a rank's part of a unit is also kept by other ranks, whole or in a copy."""
    return isinstance(link, TwoHops)


def divides_layers(comm: Comm) -> bool:
    """Tell whether ranks have parts of layers."""
    return comm.mesh.tensor * comm.mesh.expert * comm.mesh.pipeline > 1
