"""Test how ranks are divided into groups on several nodes, and how they are numbered in a mesh."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
import torch

from zlaunch.runtime.comm.nodes import Mesh, NodeRanks, divide, find_nodes
from zlaunch.runtime.config import ConfigError
from zlaunch.runtime.mesh import MeshShape


def nodes(*counts: int) -> list[NodeRanks]:
    found, first = [], 0
    for number, count in enumerate(counts):
        found.append(NodeRanks(f"n{number}", range(first, first + count)))
        first += count
    return found


def test_groups_of_several_whole_nodes() -> None:
    """Four nodes of two ranks: groups of four ranks are two whole nodes each."""
    mesh = divide(4, "key", nodes(2, 2, 2, 2))
    assert (mesh, mesh.count) == (Mesh(8, 4), 2)
    assert mesh.shard_groups() == [range(0, 4), range(4, 8)]
    assert [list(ranks) for ranks in mesh.replica_groups()] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_groups_of_a_node_and_of_parts_of_one_on_four_nodes() -> None:
    four = nodes(4, 4, 4, 4)
    assert divide("node", "key", four) == divide(4, "key", four) == Mesh(16, 4)
    assert divide(2, "key", four).count == 8 and divide(16, "key", four).count == 1
    assert divide(8, "key", four).shard_groups() == [range(0, 8), range(8, 16)]


def test_groups_of_whole_nodes_that_are_not_equal() -> None:
    mesh = divide(6, "key", nodes(2, 4, 2, 4))
    assert mesh.shard_groups() == [range(0, 6), range(6, 12)]
    assert divide(6, "key", nodes(6, 4, 2)) == Mesh(12, 6)


@pytest.mark.parametrize(
    ("size", "counts", "fitting"),
    [
        (6, (4, 4, 4), "1, 2, 4, 12"),  # a node and a half
        (4, (2, 4, 2, 4), "1, 2, 6, 12"),  # each node has a size that fits, but lies across two groups
        (3, (6, 4, 2), "1, 2, 6, 12"),
        (4, (2, 4, 4, 2), "1, 2, 6, 12"),
    ],
)
def test_groups_that_would_cut_a_node_are_refused(size: int, counts: tuple[int, ...], fitting: str) -> None:
    with pytest.raises(ConfigError, match=f"of {size} ranks would split .* possible sizes: {fitting}$"):
        divide(size, "key", nodes(*counts))


CPU = torch.device("cpu")


def told(*places: tuple[int, int, str], domains: Sequence[str | None] | None = None) -> list[NodeRanks]:
    """Return the nodes that are found when the ranks report these places and NVLink domains."""
    each = domains or [None] * len(places)
    return find_nodes(lambda _: [(*place, own) for place, own in zip(places, each, strict=True)], CPU)


def test_nodes_are_found_by_their_first_rank_not_by_their_name() -> None:
    """Containers on different machines may have one host name."""
    found = told((0, 2, "c"), (0, 2, "c"), (2, 1, "c"))
    assert [(node.name, node.ranks) for node in found] == [("c", range(0, 2)), ("c", range(2, 3))]


def test_a_rank_tells_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 5), ("LOCAL_RANK", 1), ("WORLD_SIZE", 8), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    seen: list[object] = []

    def exchange(place: object) -> Sequence[object]:
        seen.append(place)
        return []

    assert find_nodes(exchange, CPU) == []  # type: ignore[arg-type]
    assert seen == [(4, 4, socket.gethostname(), None)]


def test_machines_in_one_nvlink_domain_are_one_node() -> None:
    places = [(first, 2, name) for first, name in ((0, "a"), (2, "b"), (4, "c"), (6, "d")) for _ in range(2)]
    found = told(*places, domains=["x"] * 6 + ["y"] * 2)
    assert found == [NodeRanks("a to c", range(6)), NodeRanks("d", range(6, 8))]
    assert told(*places, domains=["x", "x", "y", "y", "x", "x", None, None]) == told(*places)
    # one GPU of a machine that has lost its links
    assert told(*places, domains=["x", None, "x", None, None, None, "x", "x"]) == told(*places)
    racks = told(*places, domains=["x"] * 4 + ["y"] * 4)
    assert divide("node", "key", racks).shard_groups() == [range(4), range(4, 8)]


@pytest.mark.parametrize(
    "places",
    [
        [(0, 2, "a"), (1, 2, "b"), (0, 2, "a"), (1, 2, "b")],  # numbered in turn
        [(0, 2, "a"), (0, 1, "a")],  # they do not agree on their number
        [(0, 1, "a"), (0, 1, "a")],
    ],
)
def test_ranks_that_are_not_numbered_node_by_node_are_refused(places: list[tuple[int, int, str]]) -> None:
    with pytest.raises(ConfigError, match="numbered node by node"):
        told(*places)


def test_a_mesh_numbers_its_ranks_with_tensor_fastest_and_pipeline_slowest() -> None:
    mesh = MeshShape(data=2, expert=2, sequence=2, tensor=2, pipeline=2)
    assert mesh.ranks == 32 and mesh.samples == 4
    assert mesh.coordinates(21) == {"pipeline": 1, "data": 0, "expert": 1, "sequence": 0, "tensor": 1}
    assert mesh.groups("tensor")[:2] == [[0, 1], [2, 3]]
    assert mesh.groups("pipeline")[:2] == [[0, 16], [1, 17]]
    assert mesh.groups("data", "expert")[0] == [0, 4, 8, 12]
    assert [mesh.sample_position(rank) for rank in (0, 3, 4, 15, 16, 31)] == [0, 0, 1, 3, 0, 3]


def test_the_ranks_of_an_axis_are_those_of_its_groups() -> None:
    mesh = MeshShape(data=2, expert=3, sequence=1, tensor=2, pipeline=2)
    for name in mesh.sizes:
        groups = mesh.groups(name)
        for rank in range(mesh.ranks):
            assert mesh.ranks_along(name, rank) in groups and rank in mesh.ranks_along(name, rank)
    assert mesh.ranks_along("expert", 15) == [13, 15, 17]
