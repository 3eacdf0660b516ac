"""Finds out which ranks share a node, and divides the ranks into groups."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import ConfigError
from ..environment import read_environment


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """Describes a node by its name and its ranks, which are consecutive."""

    name: str
    ranks: range


def find_nodes(exchange: Callable[[object], list[Any]]) -> list[NodeRanks]:
    """Return the nodes, in the order of their ranks. Collective. Raises ConfigError if the launcher has not
    numbered the ranks node by node.
    """
    environment = read_environment()
    place = environment.rank - environment.index_on_node, environment.local_world_size, socket.gethostname()
    found: dict[int, NodeRanks] = {}
    for rank, (first, count, name) in enumerate(exchange(place)):
        node = found.setdefault(first, NodeRanks(name, range(first, first + count)))
        if rank not in node.ranks or node.ranks != range(first, first + count):
            raise ConfigError(
                [f"rank {rank} is on {name}, out of order: groups of ranks need ranks numbered node by node"]
            )
    return list(found.values())


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
