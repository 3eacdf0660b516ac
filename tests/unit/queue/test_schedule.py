"""Test which waiting jobs get which slots, without any job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.queue import schedule
from zlaunch.queue.schedule import Assignments, Demand, Running, Slots, Waiting, decide

TWO_HOSTS: Slots = {"a": (0, 1, 2), "b": (0, 1, 2)}


def demand(nodes: int, per_node: int | None, pool: Slots = TWO_HOSTS) -> Demand:
    return Demand(pool, nodes, per_node)


def holding(number: int, slots: Slots, priority: int = 0, **more: bool) -> Running:
    return Running(number, priority, slots, more.get("preemptible", False), more.get("ends", False))


@pytest.mark.parametrize(
    ("wanted", "given_slots"),
    [
        (demand(1, 1), {"a": (0,)}),
        (demand(1, None), {"a": (0, 1, 2)}),
        (demand(2, 2), {"a": (0, 1), "b": (0, 1)}),
        (demand(1, None, {"b": (2,)}), {"b": (2,)}),
        (demand(1, 4), None),
        (demand(3, 1), None),
    ],
)
def test_free_slots_are_given_in_the_pools_order(wanted: Demand, given_slots: Slots | None) -> None:
    starts = {} if given_slots is None else {1: given_slots}
    assert decide([Waiting(1, 0, wanted)], []) == Assignments(starts)


def test_the_first_goes_first_unless_a_later_one_has_a_higher_priority() -> None:
    one = demand(1, None, {"a": (0,)})
    assert decide([Waiting(2, 0, one), Waiting(1, 0, one)], []).starts == {1: {"a": (0,)}}
    assert decide([Waiting(1, 0, one), Waiting(2, 1, one)], []).starts == {2: {"a": (0,)}}


def test_a_large_job_is_not_held_up_by_later_small_ones() -> None:
    running = [holding(1, {"a": (0, 1)}), holding(2, {"b": (0,)})]
    waiting = [Waiting(3, 0, demand(1, 3)), Waiting(4, 0, demand(1, 1))]
    # b needs one slot more for the large job, a two: the small one gets what is free of a
    assert decide(waiting, running).starts == {4: {"a": (2,)}}
    assert decide(waiting, running[:1]).starts == {3: {"b": (0, 1, 2)}, 4: {"a": (2,)}}


def test_what_may_be_preempted_makes_room_once() -> None:
    running = [holding(1, {"a": (0, 1, 2)}, preemptible=True), holding(2, {"b": (0, 1, 2)})]
    high = Waiting(3, 1, demand(1, 2))
    assert decide([high], running) == Assignments({}, [1])
    assert decide([replace(high, priority=0)], running) == Assignments()
    asked = [replace(running[0], ends=True), running[1]]
    assert decide([high], asked) == Assignments()
    # a second one finds no other to be asked, and the slots that come free are the first one's
    assert decide([high, replace(high, id=4)], asked) == Assignments()
    assert decide([high], [running[1]]).starts == {3: {"a": (0, 1)}}


def test_the_lowest_priority_makes_room() -> None:
    running = [holding(1, {"a": (0,)}, 5, preemptible=True), holding(2, {"a": (1,)}, 0, preemptible=True)]
    assert decide([Waiting(3, 6, demand(1, 1, {"a": (0, 1)}))], running).preempted == [2]


def test_nobody_is_preempted_where_that_does_not_help() -> None:
    running = [holding(1, {"a": (0,)}, preemptible=True), holding(2, {"a": (1,)})]
    assert decide([Waiting(3, 9, demand(1, None, {"a": (0, 1)}))], running) == Assignments()


def test_a_host_that_rests_gets_no_job_and_is_reserved_for_none() -> None:
    both, one = demand(2, 1), demand(1, 1)
    assert decide([Waiting(1, 0, one)], [], ["a"]).starts == {1: {"b": (0,)}}
    # The first needs both hosts: what is free of the other goes to the second.
    assert decide([Waiting(1, 0, both), Waiting(2, 0, one)], [], ["a"]).starts == {2: {"b": (0,)}}
    assert decide([Waiting(1, 0, one)], [], ["a", "b"]) == Assignments()


def test_a_slot_that_rests_leaves_the_others_of_its_host() -> None:
    rests = ["a:0", "b:1"]
    assert decide([Waiting(1, 0, demand(2, 2))], [], rests).starts == {1: {"a": (1, 2), "b": (0, 2)}}
    assert decide([Waiting(1, 0, demand(1, 3))], [], rests) == Assignments()
    assert decide([Waiting(1, 0, demand(1, None))], [], ["a:0"]).starts == {1: {"b": (0, 1, 2)}}


def test_equal_jobs_that_wait_are_weighed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep has a thousand of them, and the daemon decides whenever anything changes."""
    weighed: list[Demand] = []
    cheapest = schedule._cheapest

    def noted(demand: Demand, *rest: Any) -> Slots | None:
        weighed.append(demand)
        return cheapest(demand, *rest)

    monkeypatch.setattr(schedule, "_cheapest", noted)
    waiting = [Waiting(number, 0, demand(1, 2)) for number in range(1000)]
    running = [holding(2000, {"a": (0, 1, 2)}), holding(2001, {"b": (0,)})]
    assert decide(waiting, running).starts == {0: {"b": (1, 2)}}
    assert len(weighed) < 10


@dataclass
class Job:
    """A job of the simulation."""

    demand: Demand
    priority: int
    length: int


jobs = st.builds(
    Job,
    demand=st.builds(demand, st.integers(1, 2), st.one_of(st.none(), st.integers(1, 3))),
    priority=st.integers(0, 2),
    length=st.integers(1, 5),
)


@given(st.lists(jobs, min_size=1, max_size=12))
def test_every_job_runs_and_no_slot_is_given_twice(jobs: Sequence[Job]) -> None:
    waiting = {number: Waiting(number, job.priority, job.demand) for number, job in enumerate(jobs)}
    left: dict[int, int] = {}
    given_slots: dict[int, Slots] = {}
    for _ in range(100):
        running = [holding(number, given_slots[number]) for number in left]
        schedule = decide(waiting.values(), running)
        for number, slots in schedule.starts.items():
            needed = waiting.pop(number).demand
            assert len(slots) == needed.nodes
            assert all(len(slots[host]) == (needed.per_node or 3) for host in slots)
            given_slots[number], left[number] = slots, jobs[number].length
        taken = [(host, slot) for n in left for host, slots in given_slots[n].items() for slot in slots]
        assert len(taken) == len(set(taken))
        assert left or not waiting, "slots are free, and yet a job waits"
        left = {number: rest - 1 for number, rest in left.items() if rest > 1}
    assert not waiting and not left
