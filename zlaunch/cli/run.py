"""`zlaunch [options] script.py [script args...]`: run a script on every slot."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from zlaunch import __version__

if TYPE_CHECKING:
    from zlaunch.launch.plan import NodeSpec, Plan

_SETTINGS = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
_EPILOG = "Other commands: zlaunch config check FILE, zlaunch config schema."


@click.command(context_settings=_SETTINGS, epilog=_EPILOG)
@click.option(
    "--num_gpus",
    "--num_accelerators",
    type=click.IntRange(min=1),
    metavar="N",
    help="Workers to start: one a GPU; without a GPU any number of CPU workers.  [default: all GPUs, or 1]",
)
@click.option("-i", "--include", metavar="FILTER", help="Slots to use: localhost:0,2-3.")
@click.option("-e", "--exclude", metavar="FILTER", help="Slots to leave out, in the same form.")
@click.option(
    "--master_port", type=int, default=0, metavar="PORT", help="Rendezvous port; 0 takes a free one."
)
@click.option(
    "--master_addr", default="127.0.0.1", show_default=True, metavar="ADDR", help="Rendezvous address."
)
@click.option("--run_dir", metavar="DIR", help="Logs, plan, events.  [default: runs/TIME-ID]")
@click.option(
    "--log_ranks",
    default="0",
    show_default=True,
    metavar="RANKS",
    help="Ranks shown on the console: 0,2-3 or all; the logs have every rank.",
)
@click.option("--module", is_flag=True, help="The script is a module name, as in python -m.")
@click.option(
    "--no_python", is_flag=True, help="The script is a program of any kind; it gets no --local_rank."
)
@click.option("--no_local_rank", is_flag=True, help="Do not pass --local_rank=N to the script.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL when the run is stopped.",
)
@click.option("--dry_run", is_flag=True, help="Print the plan and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry_run: the plan as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Show only the workers' output and failures.")
@click.version_option(__version__, message="zlaunch %(version)s")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    command: tuple[str, ...],
    num_gpus: int | None,
    include: str | None,
    exclude: str | None,
    master_port: int,
    master_addr: str,
    run_dir: str | None,
    log_ranks: str,
    module: bool,
    no_python: bool,
    no_local_rank: bool,
    grace: float,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run SCRIPT on every GPU of this machine (or on CPU workers), stop all when one fails.

    Options before SCRIPT are zlaunch's; everything after it is the script's, untouched.
    """
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry_run")
    if not math.isfinite(grace):
        raise click.UsageError("--grace: not a number of seconds")
    from zlaunch.cli import checks
    from zlaunch.launch.plan import Target, make_plan
    from zlaunch.launch.processes import python_module_argv

    mode = _check_command(command, module=module, no_python=no_python)
    node = _choose_slots(num_gpus, include, exclude)
    ranks = checks.parse_ranks(log_ranks, node.workers)
    for warning in checks.check_configs(command[1:]):
        print(f"zlaunch: warning: {warning}", file=sys.stderr)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    folder = Path(run_dir if run_dir is not None else Path("runs", run_id)).absolute()
    plan = make_plan(
        Target(mode, command[0], command[1:], pass_local_rank=not (no_local_rank or no_python)),
        [node],
        run_id=run_id,
        run_dir=str(folder),
        master_addr=master_addr,
        master_port=checks.pick_port(master_port),
        cwd=os.getcwd(),
        grace_s=grace,
        bootstrap=python_module_argv("zlaunch.launch.bootstrap"),
        environ=os.environ,
    )
    if dry_run:
        _print_plan(plan, as_json=as_json)
        return 0
    checks.make_run_dir(folder)
    return _launch(plan, ranks, quiet=quiet)


def _check_command(
    command: tuple[str, ...], *, module: bool, no_python: bool
) -> Literal["script", "module", "exec"]:
    from zlaunch.cli import checks

    if not command or not command[0]:
        raise click.UsageError("no script given; see zlaunch --help")
    if module and no_python:
        raise click.UsageError("--module and --no_python exclude each other")
    if module:
        checks.check_module(command[0])
        return "module"
    if no_python:
        checks.check_program(command[0])
        return "exec"
    checks.check_script(command[0])
    return "script"


def _choose_slots(num_gpus: int | None, include: str | None, exclude: str | None) -> NodeSpec:
    """This machine's slots after --num_gpus or the filters."""
    from zlaunch.hostfiles import filters
    from zlaunch.launch.devices import available_cores, discover
    from zlaunch.launch.plan import NodeSpec

    if include is not None and exclude is not None:
        raise click.UsageError("--include and --exclude exclude each other")
    if num_gpus is not None and (include is not None or exclude is not None):
        raise click.UsageError("--num_gpus does not go with --include or --exclude")
    devices = discover(os.environ)
    count = len(devices.tokens)
    filter_text = include if include is not None else exclude
    if filter_text is None:
        if num_gpus is not None and count and num_gpus > count:
            raise click.UsageError(f"--num_gpus {num_gpus}: this machine has {devices.describe()}")
        slots = tuple(range(num_gpus or count or 1))
    else:
        try:
            selection = _as_localhost(filters.parse(filter_text))
            # Without GPUs a slot is a CPU worker, and there are as many as are named.
            named = [slot for chosen in selection.values() for slot in chosen or ()]
            pool = {"localhost": range(count or max(named, default=0) + 1)}
            choose = filters.exclude if include is None else filters.include
            slots = choose(pool, selection)["localhost"]
        except filters.FilterError as error:
            hidden = f"; CUDA_VISIBLE_DEVICES={devices.visible}" if devices.visible is not None else ""
            option = "--exclude" if include is None else "--include"
            raise click.UsageError(f"{option} {filter_text!r}: {error}{hidden}") from None
    tokens = tuple(devices.tokens[slot] for slot in slots) if count else ()
    return NodeSpec("localhost", workers=len(slots), cores=available_cores(), devices=tokens)


def _as_localhost(selection: dict[str, frozenset[int] | None]) -> dict[str, frozenset[int] | None]:
    """This machine's own names mean localhost; any other host is refused."""
    from zlaunch.hostfiles.filters import FilterError

    own = {"localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0]}
    merged: dict[str, frozenset[int] | None] = {}
    for host, slots in selection.items():
        if host not in own:
            raise FilterError(f"unknown host {host!r}: without a hostfile only localhost can be chosen")
        known = merged.get("localhost", frozenset())
        merged["localhost"] = None if slots is None or known is None else known | slots
    return merged


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print(plan.to_json(indent=2))
        return
    from rich.console import Console

    from zlaunch.view.plan_table import plan_table

    Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160, highlight=False).print(
        plan_table(plan)
    )


def _launch(plan: Plan, ranks: list[int], *, quiet: bool) -> int:
    from zlaunch.launch.agent import agent_argv
    from zlaunch.launch.controller import Controller
    from zlaunch.launch.transports.local import LocalTransport
    from zlaunch.view.console import Console

    console = Console(ranks, quiet=quiet)
    workers = f"{plan.world_size} worker{'s' * (plan.world_size > 1)}"
    console.message(f"{workers} on localhost, rendezvous {plan.master_addr}:{plan.master_port}")
    console.message(f"logs in {os.path.relpath(plan.run_dir)}")
    logs = Path(plan.run_dir, "logs")
    return Controller(
        plan,
        console,
        lambda index: LocalTransport(plan.nodes[index].host, agent_argv(), logs / f"agent_{index:05d}.log"),
    ).run()
