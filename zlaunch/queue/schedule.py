"""Decide which waiting jobs get which slots, and which running ones have to make room. Pure functions.

Jobs are served by priority, then in the order in which they came. One that has to wait reserves the slots
that it will get soonest, so that no later one holds it up; what no earlier one needs a later one gets at
once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby

from zlaunch.errors import LaunchError
from zlaunch.launchers.base import HostSelection, Launcher
from zlaunch.launchers.cluster import ClusterLauncher
from zlaunch.launchers.this_node import LocalLauncher
from zlaunch.plan.options import own_names
from zlaunch.system.machine import discover

# -- schedule ---------------------------------------------------------------------------------------


Slots = dict[str, tuple[int, ...]]
"""Host -> slots, in rank order."""
Place = str
"""A host, or a slot as the grammar of --include has it: `n1:3`."""
_Slot = tuple[str, int]
_Cost = tuple[int, int, int, int]
"""Cost of a slot, compared in order: slots busy for an unknown time, slots that need preemption, priorities
of the preempted jobs, slots that will be free soon.
"""


@dataclass(frozen=True)
class Demand:
    """Says what a job needs: so many slots on each of so many hosts, out of a pool."""

    pool: Slots
    nodes: int
    per_node: int | None
    """None: on each host all that the pool has of it."""

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Return what equal demands have in common, as a key of a dictionary."""
        return (self.nodes, self.per_node, *self.pool.items())


@dataclass(frozen=True, slots=True)
class Waiting:
    """Describes a job that may start."""

    id: int
    priority: int
    demand: Demand

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what jobs have in common that are served alike."""
        return self.priority, self.demand.key


@dataclass(frozen=True, slots=True)
class Running:
    """Describes a job that has slots."""

    id: int
    priority: int
    slots: Slots
    preemptible: bool
    """Tells whether it may be asked to save and make room for a higher priority."""
    ends: bool
    """Tells whether it has been asked to end: its slots will soon be free."""


@dataclass(slots=True)
class Assignments:
    """Says what is to be done now."""

    starts: dict[int, Slots] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)


def decide(
    waiting: Iterable[Waiting], running: Iterable[Running], backing_off: Collection[Place] = ()
) -> Assignments:
    """Give free slots to waiting jobs: none is given twice, or to a job while an earlier one waits for it.

    No job gets or reserves slots in `backing_off`, or slots of hosts in it.
    """
    found = Assignments()
    board = _Board(running)
    settled: dict[tuple[object, ...], tuple[int, int]] = {}
    """Kind of job -> the board's progress when a job of this kind got nothing. While it is the same, the next
    job of this kind gets nothing either.
    """
    order = sorted(waiting, key=lambda job: (-job.priority, job.id))
    for kind, jobs in groupby(order, lambda job: job.kind):
        for job in jobs:
            before = board.progress
            if settled.get(kind) == before:
                break
            _serve(job, board, found, backing_off)
            if board.progress == before:
                settled[kind] = before
    return found


def _serve(job: Waiting, board: _Board, found: Assignments, backing_off: Collection[Place]) -> None:
    """Give a job its slots, or reserve them for it; where the pool is too small, nothing."""
    cost = partial(board.cost, job.priority)
    chosen = _cheapest(job.demand, cost, backing_off)
    if chosen is None:
        return
    unknown, by_force, _, soon = _total(map(cost, _each(chosen)))
    if not (unknown or by_force or soon):
        found.starts[job.id] = chosen
    elif by_force and not unknown:
        found.preempted += board.preempt(chosen)
    board.blocked |= set(_each(chosen))


class _Board:
    """Holds who has which slots, and which are spoken for."""

    def __init__(self, running: Iterable[Running]) -> None:
        jobs = list(running)
        self._holders = {slot: job for job in jobs for slot in _each(job.slots)}
        self._leaving = {job.id for job in jobs if job.ends}
        self.blocked: set[_Slot] = set()

    @property
    def progress(self) -> tuple[int, int]:
        """Return what changes whenever costs change: slots only become blocked, and jobs only leave."""
        return len(self.blocked), len(self._leaving)

    def cost(self, priority: int, slot: _Slot) -> _Cost:
        """Return what is in the way of a slot for a job of this priority."""
        holder = self._holders.get(slot)
        if slot in self.blocked:
            return 1, 0, 0, 0
        if holder is None:
            return 0, 0, 0, 0
        if holder.id in self._leaving:
            return 0, 0, 0, 1
        can_go = holder.preemptible and holder.priority < priority
        return (0, 1, holder.priority, 0) if can_go else (1, 0, 0, 0)

    def preempt(self, slots: Slots) -> list[int]:
        """Have the jobs that hold these slots leave; return those that have to be asked."""
        victims = {self._holders[slot].id for slot in _each(slots) if slot in self._holders} - self._leaving
        self._leaving |= victims
        return sorted(victims)


def place_of(host: str, slot: int) -> Place:
    """Return a slot as a place."""
    return f"{host}:{slot}"


def _each(slots: Mapping[str, Iterable[int]]) -> list[_Slot]:
    return [(host, slot) for host, numbers in slots.items() for slot in numbers]


def _total(costs: Iterable[_Cost]) -> _Cost:
    unknown, by_force, priorities, soon = map(sum, zip(*costs, strict=True))
    return unknown, by_force, priorities, soon


def _cheapest(demand: Demand, cost: Callable[[_Slot], _Cost], backing_off: Collection[Place]) -> Slots | None:
    """Return the slots with the least in their way; None where the pool is too small for the demand."""
    offers: dict[str, tuple[_Cost, tuple[int, ...]]] = {}
    for host, numbers in demand.pool.items():
        if host in backing_off:
            continue
        count = len(numbers) if demand.per_node is None else demand.per_node
        awake = [number for number in numbers if place_of(host, number) not in backing_off]
        best = sorted((cost((host, number)), number) for number in awake)[:count]
        if 0 < count == len(best):
            offers[host] = _total(each for each, _ in best), tuple(sorted(number for _, number in best))
    if len(offers) < demand.nodes:
        return None
    hosts = sorted(offers, key=lambda host: offers[host][0])[: demand.nodes]
    return {host: offers[host][1] for host in demand.pool if host in hosts}


# -- demand -----------------------------------------------------------------------------------------
#
# Find out which slots a run needs, from the launcher that its command line has come to.


_HERE = "localhost"


def find_demand(launcher: Launcher) -> tuple[Demand, dict[str, str]]:
    """Return what a run needs, and the names that its hosts have in the hostfile: this machine is `localhost`
    in every demand. Raises LaunchError.
    """
    if isinstance(launcher, LocalLauncher):
        return _demand_here(launcher), {}
    if isinstance(launcher, ClusterLauncher):
        return _demand_of_hosts(launcher)
    raise LaunchError(
        f"the queue runs jobs on this machine or on hosts of a hostfile, not by --launcher {launcher.name}"
    )


def _demand_here(launcher: LocalLauncher) -> Demand:
    launch = launcher.launch
    devices = discover(os.environ)
    if devices.tokens and devices.tokens != discover({}).tokens:
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={devices.visible} hides GPUs, but the queue assigns GPUs by index: "
            "unset it, and choose GPUs with --include localhost:N"
        )
    count = len(devices.tokens) or len(os.sched_getaffinity(0))
    if max(launcher.slots) >= count:
        named = launch.include is not None or launch.exclude is not None
        asked = f"slot {max(launcher.slots)} was" if named else f"{len(launcher.slots)} slots were"
        asked += " asked for"
        raise LaunchError(
            f"{asked}, but this machine has {count}, one per core: "
            "for more, use a --hostfile with the line `localhost slots=N`"
        )
    if launch.include is not None or launch.exclude is not None:
        return Demand({_HERE: launcher.slots}, 1, None)
    return Demand({_HERE: tuple(range(count))}, 1, len(launcher.slots))


def _demand_of_hosts(launcher: ClusterLauncher) -> tuple[Demand, dict[str, str]]:
    launch = launcher.launch
    everything = HostSelection(replace(launch, num_gpus=None, num_nodes=None), launcher.entries())
    if everything.chosen is None:
        unknown = ", ".join(host for host, entry in everything.entries.items() if entry.slots is None)
        raise LaunchError(f"the queue needs the number of slots: write slots=N after {unknown}")
    names: dict[str, str] = {}
    for host in everything.chosen:
        name = _HERE if host in own_names() else host
        if name in names:
            raise LaunchError(f"the hostfile names this machine twice: as {names[name]} and as {host}")
        names[name] = host
    pool = {name: everything.chosen[host] for name, host in names.items()}
    return Demand(pool, launch.num_nodes or len(pool), launch.num_gpus), names
