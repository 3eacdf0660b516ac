"""Test the numbers of workers that failures may leave a run with."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from zlaunch.plan.world_sizes import possible_world_sizes


def test_equal_hosts() -> None:
    assert possible_world_sizes((8, 8, 8), spares=0, min_nodes=1) == (24, 8, 16)
    assert possible_world_sizes((8, 8, 8), spares=0, min_nodes=None) == (24,)


def test_a_spare_host_with_fewer_slots_makes_the_run_smaller() -> None:
    assert possible_world_sizes((8, 8, 4), spares=1, min_nodes=None) == (16, 12)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 6))
def test_every_choice_of_hosts_is_counted(slots: list[int], spares: int, fewest: int) -> None:
    spares = min(spares, len(slots) - 1)
    wanted = len(slots) - spares
    fewest = min(fewest, wanted)
    sums = {sum(some) for count in range(fewest, wanted + 1) for some in combinations(slots, count)}
    found = possible_world_sizes(tuple(slots), spares, fewest)
    assert set(found) == sums and found[0] == sum(slots[:wanted]) and len(found) == len(sums)


def test_a_thousand_hosts_of_two_kinds() -> None:
    found = possible_world_sizes((8,) * 500 + (4,) * 500, spares=3, min_nodes=990)
    assert found[0] == 8 * 500 + 4 * 497 and min(found) == 8 * 490 + 4 * 500
