"""Show a plan as a table, for `--dry_run`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zlaunch.plan.plan import Plan

if TYPE_CHECKING:
    from zlaunch.runtime.config import MeshShape


T = TypeVar("T")
_COLUMNS = "sequence", "tensor"
"""Names the axes whose ranks share samples, and stand in one row."""
_CROSSING = {
    "tensor": "each layer waits for the network between nodes",
    "sequence": "each attention waits for the network between nodes",
    "expert": "tokens travel between nodes to their experts",
}
"""Says what a group of ranks that crosses nodes means, by its axis."""

_FIRST = 56
_LAST = 8
"""Rows of a table that are shown; rich takes seconds for the 8,000 workers of 1,000 nodes."""
_SUMMARIZED = 8
"""Ranks above which the table is so long that a line above it says which node has which."""
_REPEATED = ("GROUP_", "ROLE_", "TORCHELASTIC_")
"""Begin the names of torchrun's variables, which say the same once more."""


def plan_table(
    plan: Plan, mesh: MeshShape | None = None, *, spares: Sequence[str] = (), min_nodes: int | None = None
) -> RenderableType:
    """Show who runs where with what, and its place in the mesh of ranks; what all share is said once.

    Args:
        plan: the plan of the first attempt.
        mesh: the mesh of its ranks, if it is known.
        spares: hosts that replace dead nodes.
        min_nodes: the fewest nodes to continue with; None: all.
    """
    workers = [worker for node in plan.nodes for worker in node.workers]
    shared = set(workers[0].env.items()).intersection(*(worker.env.items() for worker in workers))
    table = Table(title=f"run {plan.run_id}", title_justify="left", show_lines=len(workers) < 17)
    names = ("rank", "host", *(("mesh",) if mesh else ()), "own environment", "command")
    for name in names:
        table.add_column(name, overflow="fold")
    rows = [(node.host, worker) for node in plan.nodes for worker in node.workers]
    for row in _ends(rows):
        if row is None:
            table.add_row("...", f"{len(rows) - _FIRST - _LAST} more workers: --json shows all")
            continue
        host, worker = row
        own = (
            f"{key}={value}"
            for key, value in worker.env.items()
            if (key, value) not in shared and not key.startswith(_REPEATED)
        )
        place = [_place(mesh, worker.rank)] if mesh else []
        table.add_row(str(worker.rank), host, *place, Text("\n".join(own)), Text(shlex.join(worker.argv)))
    drawn = [] if mesh is None else [_draw(plan, mesh)]
    summary = [_summary(plan)] if len(workers) > _SUMMARIZED else []
    return Group(*summary, table, *drawn, Text("\n".join(_facts(plan, dict(shared), spares, min_nodes))))


def _summary(plan: Plan) -> Text:
    """Return one line with the ranks of each node, whose numbers are consecutive."""
    parts = []
    for node in plan.nodes:
        first, last = node.workers[0].rank, node.workers[-1].rank
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        parts.append(f"{node.host}: {ranks}")
    ends = [part or "..." for part in _ends(parts)]
    return Text(", ".join(ends))


def _ends(rows: Sequence[T]) -> list[T | None]:
    """Return the first and the last rows of a long table, with None for those between."""
    if len(rows) <= _FIRST + _LAST:
        return list(rows)
    return [*rows[:_FIRST], None, *rows[-_LAST:]]


def _place(mesh: MeshShape, rank: int) -> str:
    return "\n".join(f"{axis} {position}" for axis, position in mesh.coordinates(rank).items())


def _draw(plan: Plan, mesh: MeshShape) -> RenderableType:
    """Draw the mesh: a row for each rank with samples of its own, or group of ranks that share samples."""
    known = {worker.rank: node.host for node in plan.nodes for worker in node.workers}
    hosts = [known.get(rank, "another node") for rank in range(plan.run_world_size)]
    sizes = " * ".join(f"{name} {size}" for name, size in mesh.axes.items())
    table = Table(title=f"mesh: {sizes}", title_justify="left")
    table.add_column("")
    for position in range(mesh.sequence * mesh.tensor):
        places = mesh.coordinates(position)
        table.add_column(", ".join(f"{axis} {places[axis]}" for axis in _COLUMNS if axis in places))
    for ranks in _ends(mesh.groups(*_COLUMNS)):
        if ranks is None:
            table.add_row("...")
            continue
        name = _row(mesh, ranks[0], *_COLUMNS)
        table.add_row(name, *(f"rank {rank} on {hosts[rank]}" for rank in ranks))
    texts = []
    for axis, what in _CROSSING.items():
        groups = mesh.groups(axis) if mesh.sizes[axis] > 1 else []
        crossing = [
            _row(mesh, ranks[0], axis) for ranks in groups if len({hosts[rank] for rank in ranks}) > 1
        ]
        if crossing:
            texts.append(f"warning: {what} at {'; '.join(crossing)}")
    return Group(table, *map(Text, texts))


def _row(mesh: MeshShape, rank: int, *without: str) -> str:
    """Say where a rank is on all other axes."""
    places = mesh.coordinates(rank)
    return ", ".join(f"{axis} {position}" for axis, position in places.items() if axis not in without)


def _facts(plan: Plan, shared: dict[str, str], spares: Sequence[str], min_nodes: int | None) -> Iterator[str]:
    part = plan.part
    nodes = len(plan.nodes) if part is None else part.node_count
    yield f"workers     {plan.run_world_size} on {nodes} node(s), grace period {plan.grace_s:g} s"
    if part is not None:
        yield f"this node   {part.first_node} of 0-{nodes - 1}, with {plan.world_size} worker(s)"
    if spares:
        yield f"spares      {', '.join(spares)}"
    if min_nodes is not None:
        yield f"min_nodes   {min_nodes}: continue without dead nodes"
    yield f"rendezvous  {plan.master_addr}:{plan.master_port}"
    yield f"run_dir     {plan.run_dir}"
    yield f"cwd         {plan.cwd}"
    yield "environment of all workers"
    yield from (f"  {key}={value}" for key, value in sorted(shared.items()) if not key.startswith(_REPEATED))
    yield f"  and torchrun's {', '.join(f'{name}*' for name in _REPEATED)}"
