"""Test which nodes and links are called slow."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.comm.benchmark import (
    NetworkLink,
    best_of,
    doubtful,
    duration,
    name_slow_links,
    name_slow_nodes,
    rate,
    rounds,
)

NOISE = st.floats(0.75, 1.3)


def names(count: int) -> list[str]:
    return [f"node{i}" for i in range(count)]


def links(data: st.DataObject, count: int, slow: dict[tuple[int, int], float]) -> list[NetworkLink]:
    """All links of `count` nodes at about 100 MB/s and 0.1 ms; those in `slow` slower by a factor."""
    return [
        NetworkLink(a, b, 1e-4 * data.draw(NOISE), 1e8 * data.draw(NOISE) / slow.get((a, b), 1.0))
        for a, b in permutations(range(count), 2)
    ]


@given(st.data(), st.integers(2, 9))
def test_equal_links(data: st.DataObject, count: int) -> None:
    found = links(data, count, {})
    assert name_slow_links(found, names(count)) == [] and doubtful(found) == []


@given(st.data(), st.integers(3, 9))
def test_a_slow_node(data: st.DataObject, count: int) -> None:
    node = data.draw(st.integers(0, count - 1))
    slow = {(a, b): 5.0 for a, b in permutations(range(count), 2) if node in (a, b)}
    found = links(data, count, slow)
    (said,) = name_slow_links(found, names(count))
    assert said.startswith(f"node{node} is slow: ")
    assert set(doubtful(found)) == set(slow)


@given(st.data(), st.integers(3, 9), st.sampled_from(["sends", "receives"]))
def test_a_node_that_is_slow_in_one_direction(data: st.DataObject, count: int, way: str) -> None:
    node = data.draw(st.integers(0, count - 1))
    side = 0 if way == "sends" else 1
    slow = {ends: 5.0 for ends in permutations(range(count), 2) if ends[side] == node}
    (said,) = name_slow_links(links(data, count, slow), names(count))
    assert said.startswith(f"node{node} {way} slowly: ")


@given(st.data(), st.integers(3, 9), st.booleans())
def test_a_slow_link(data: st.DataObject, count: int, both: bool) -> None:
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True).map(sorted))
    slow = {(a, b): 5.0} | ({(b, a): 5.0} if both else {})
    (said,) = name_slow_links(links(data, count, slow), names(count))
    way = "between node{} and node{}" if both else "from node{} to node{}"
    assert said.startswith(f"the link {way.format(a, b)} is slow: ")


def test_two_nodes_have_a_slow_direction_at_most() -> None:
    found = [NetworkLink(0, 1, 1e-4, 1e7), NetworkLink(1, 0, 1e-4, 1e8)]
    assert name_slow_links(found, names(2)) == [
        "the link from node0 to node1 is slow: 10 MB/s, elsewhere 100 MB/s"
    ]


def test_a_node_that_answers_late() -> None:
    found = [NetworkLink(a, b, 0.05 if 1 in (a, b) else 1e-4, 1e8) for a, b in permutations(range(3), 2)]
    assert name_slow_links(found, names(3)) == ["node1 has high latency: 50 ms, elsewhere 100 µs"]


def test_the_best_of_several_measurements() -> None:
    again = [NetworkLink(0, 1, 2.0, 5.0), NetworkLink(1, 0, 1.0, 1.0), NetworkLink(0, 1, 1.0, 3.0)]
    assert best_of(again) == [NetworkLink(0, 1, 1.0, 5.0), NetworkLink(1, 0, 1.0, 1.0)]


def test_a_node_that_is_slow_inside() -> None:
    speeds = {"a": 5e9, "b": 1e9, "c": 4.5e9}
    assert name_slow_nodes(speeds, "an all-gather") == [
        "b has a slow internal network: an all-gather reaches 1 GB/s, elsewhere 4.75 GB/s"
    ]
    assert name_slow_nodes({}, "an all-gather") == name_slow_nodes({"a": 1.0}, "an all-gather") == []


@pytest.mark.parametrize("count", range(2, 12))
def test_rounds_pair_each_with_each(count: int) -> None:
    pairs = list(rounds(count))
    met = [pair for each in pairs for pair in each]
    assert len(pairs) == count - 1 + count % 2
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in pairs)


def test_units() -> None:
    assert [rate(x) for x in (12.345e9, 940e6, 5e3)] == ["12.3 GB/s", "940 MB/s", "5 kB/s"]
    assert [duration(x) for x in (2.5, 0.0503, 85e-6)] == ["2.5 s", "50.3 ms", "85 µs"]
