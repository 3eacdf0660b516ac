"""Show a plan as a table, for `--dry_run`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zlaunch.plan.plan import Plan


def plan_table(plan: Plan) -> RenderableType:
    """Show who runs where with what; what all workers share is said once."""
    workers = [worker for node in plan.nodes for worker in node.workers]
    shared = set(workers[0].env.items()).intersection(*(worker.env.items() for worker in workers))
    table = Table(title=f"run {plan.run_id}", title_justify="left", show_lines=len(workers) < 17)
    for name in ("rank", "host", "own environment", "command"):
        table.add_column(name, overflow="fold")
    for node in plan.nodes:
        for worker in node.workers:
            own = (f"{key}={value}" for key, value in worker.env.items() if (key, value) not in shared)
            table.add_row(str(worker.rank), node.host, Text("\n".join(own)), Text(shlex.join(worker.argv)))
    return Group(table, Text("\n".join(_facts(plan, dict(shared)))))


def _facts(plan: Plan, shared: dict[str, str]) -> Iterator[str]:
    yield f"workers     {plan.world_size} on {len(plan.nodes)} node(s), grace period {plan.grace_s:g} s"
    yield f"rendezvous  {plan.master_addr}:{plan.master_port}"
    yield f"run_dir     {plan.run_dir}"
    yield f"cwd         {plan.cwd}"
    yield "environment of all workers"
    yield from (f"  {key}={value}" for key, value in sorted(shared.items()))
