"""`zlaunch [options] script.py [script args...]`: run a script on every slot."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from zlaunch import __version__
from zlaunch.cli.commands import OTHER_FLAGS, SETTINGS, Launch
from zlaunch.cli.deepspeed_flags import deepspeed_flags, launcher_name
from zlaunch.plan.options import (
    ALONE,
    COMPAT_CHOICES,
    Launcher,
    Options,
    choose_launcher,
    has_terminal,
    python_there,
    reach_options,
)

if TYPE_CHECKING:
    from zlaunch.launch.job import Job
    from zlaunch.plan.plan import Plan
    from zlaunch.slurm.environment import Allocation

_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}
_EPILOG = "A script with the name of a command: zlaunch ./ps"


@click.command(cls=Launch, context_settings=_SETTINGS, epilog=_EPILOG)
@click.option(
    "--num_gpus",
    "--num_accelerators",
    type=click.IntRange(min=1),
    metavar="N",
    help="Workers on each node: one a GPU; without a GPU any number.  [default: all GPUs, or 1]",
)
@click.option("-H", "--hostfile", metavar="FILE", help="Hosts to run on: lines of HOST slots=N.")
@click.option("--num_nodes", type=click.IntRange(min=1), metavar="N", help="Use the first N hosts.")
@click.option("-i", "--include", metavar="FILTER", help="Hosts and slots to use: node1:0,2-3@node[2-4].")
@click.option("-e", "--exclude", metavar="FILTER", help="Hosts and slots to leave out, in the same form.")
@click.option(
    "--launcher",
    metavar="[local|ssh|openssh|slurm|openmpi]",
    callback=launcher_name,
    help="How to reach the nodes; openssh is the ssh program.  [default: found out, and said]",
)
@click.option(
    "--master_port",
    type=int,
    default=0,
    metavar="PORT",
    help="Rendezvous port; 0 takes a free one.",
)
@click.option(
    "--master_addr", metavar="ADDR", help="Rendezvous address.  [default: one of node 0 that all reach]"
)
@reach_options
@click.option("--no_ssh", is_flag=True, help="The same command is started on each node by hand.")
@click.option(
    "--node_rank", type=int, metavar="N", help="Which of the nodes this is, of those started by hand."
)
@deepspeed_flags
@click.option("--env", multiple=True, metavar="KEY[=VAL]", help="Export a variable to the nodes; repeatable.")
@click.option("--workdir", metavar="DIR", help="Folder to run in on every node.  [default: this one]")
@click.option(
    "--connect_timeout",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For a node to answer at the start.",
)
@click.option(
    "--heartbeat",
    type=click.FloatRange(min=1),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="A node silent for so long is lost.",
)
@click.option(
    "--max_restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Start all workers anew after a failure, so many times.",
)
@click.option(
    "--min_nodes", type=click.IntRange(min=1), metavar="N", help="Go on without dead nodes while N are left."
)
@click.option(
    "--hang_timeout",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Stop, with the stacks of all ranks, when no rank has written anything for so long.",
)
@click.option(
    "--requeue", is_flag=True, help="In SLURM: requeue the job after a stop asked for by SIGUSR1 or SIGTERM."
)
@click.option("--bind_cores_to_rank", is_flag=True, help="Give each worker its share of the node's cores.")
@click.option("--bind_core_list", metavar="CORES", help="The same, of these cores: 0-7,16-23.")
@click.option(
    "--run_dir", "--enable_each_rank_log", metavar="DIR", help="Logs, plan, events.  [default: runs/TIME-ID]"
)
@click.option(
    "--log_ranks",
    metavar="RANKS",
    help="Ranks shown on the console: 0,2-3 or all; the logs have every rank.  [default: 0]",
)
@click.option("-m", "--module", is_flag=True, help="The script is a module name, as in python -m.")
@click.option(
    "--no_python", is_flag=True, help="The script is a program of any kind; it gets no --local_rank."
)
@click.option("--no_preload", is_flag=True, help="Start each worker by itself, not as forks of one process.")
@click.option("--no_local_rank", is_flag=True, help="Do not pass --local_rank=N to the script.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL when the run is stopped.  [default: 3; with --requeue 25]",
)
@click.option(
    "--compat",
    type=click.Choice(COMPAT_CHOICES),
    help="What `import deepspeed` is: auto, zlaunch where the real one is not installed; deepspeed, zlaunch "
    "in any case; none, the real one.  [default: auto]",
)
@click.option("--dry_run", is_flag=True, help="Print the plan and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry_run: the plan as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Show only the workers' output and failures.")
@click.version_option(__version__, message="zlaunch %(version)s")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(command: tuple[str, ...], **given: Any) -> int:
    """Run SCRIPT on every GPU (or on CPU workers) of this machine, of the hosts of a hostfile, or of a SLURM
    job; stop all when one fails.

    Options before SCRIPT are zlaunch's; everything after it is the script's, untouched.
    """
    if given["as_json"] and not given["dry_run"]:
        raise click.UsageError("--json goes with --dry_run")
    for name in ("hostfile", "run_dir"):  # what accelerate and DeepSpeed's own wrappers pass for nothing
        given[name] = None if given[name] == "None" else given[name]
    if OTHER_FLAGS in given:
        from zlaunch.cli.torchrun_flags import settle

        given = {**settle(given), "num_processes": given["num_processes"]}
    for note in given.get("notes", ()) if not given["quiet"] else ():
        print(f"zlaunch: {note}", file=sys.stderr)
    given["log_ranks"] = given["log_ranks"] or "0"
    given["no_ssh"] = given["no_ssh"] or given["node_rank"] is not None
    if given["no_ssh"] and given["node_rank"] is None:
        raise click.UsageError("--no_ssh and --node_rank N go together")
    if given["master_addr"] is not None and not given["master_addr"].strip():
        raise click.UsageError("--master_addr is empty")
    if given["run_dir"] is not None and not given["run_dir"].strip():
        raise click.UsageError("--run_dir is empty")
    given["quiet"] = given["quiet"] or given["log_level"] in ("error", "critical")
    if given["include"] is not None and given["exclude"] is not None:
        raise click.UsageError("--include and --exclude exclude each other")
    from zlaunch.launchers.pods import take_pod
    from zlaunch.plan import checks

    mode = _check_command(
        command, module=given["module"], no_python=given["no_python"], folder=given["workdir"]
    )
    allocation = _allocation()
    take_pod(given, allocation)
    options = _options(command, mode, given)
    launcher, why = choose_launcher(options, allocation)
    _refuse_without_effect(launcher, allocation, given)
    if launcher == "step" and given["run_dir"] is None:
        assert allocation is not None
        folder = f"slurm-{allocation.job_id}.{allocation.step_id}/task_{allocation.procid:05d}"
        options = replace(options, run_dir=str(Path("runs", folder).absolute()))
    job, plan, where = _prepare(options, launcher, allocation, given["min_nodes"])
    world = plan.world_size if plan is not None else None
    warnings = checks.check_configs(
        (command[0], *given.get("configs", ()), *command[1:]),
        module=mode == "module",
        folder=given["workdir"],
        world_size=world,
    )
    if given["dry_run"]:
        if plan is None:
            raise click.UsageError(
                "--dry_run: the hostfile has hosts without slots=N, so only a launch can tell"
            )
        _print_plan(plan, as_json=given["as_json"])
        if launcher not in ALONE:
            note = "addresses, interfaces, cores and GPUs are filled in when the nodes have answered"
            print(f"zlaunch: {note}", file=sys.stderr)
        for warning in warnings:  # in a run rank 0 says them
            print(f"zlaunch: warning: {warning}", file=sys.stderr)
        return 0
    ranks = checks.parse_ranks(given["log_ranks"], world)
    checks.make_run_dir(Path(options.run_dir), shared=launcher in ("step", "hand"))
    return _launch(job, launcher, why, where, ranks, given)


def _options(
    command: tuple[str, ...], mode: Literal["script", "module", "exec"], given: dict[str, Any]
) -> Options:
    from zlaunch.plan.checks import check_port, shared_imports
    from zlaunch.plan.plan import Target
    from zlaunch.system.devices import parse_cores

    grace = given["grace"] if given["grace"] is not None else 25.0 if given["requeue"] else 3.0
    for name, value in (
        ("grace", grace),
        ("heartbeat", given["heartbeat"]),
        ("hang_timeout", given["hang_timeout"]),
    ):
        if not math.isfinite(value):
            raise click.UsageError(f"--{name}: not a number of seconds")
    check_port(given["master_port"])
    try:
        cores = parse_cores(given["bind_core_list"]) if given["bind_core_list"] is not None else None
    except ValueError as error:
        raise click.UsageError(f"--bind_core_list {given['bind_core_list']!r}: {error}") from None
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    folder = Path(given["run_dir"] if given["run_dir"] is not None else Path("runs", run_id)).absolute()
    python_target = mode != "exec" and not given["no_preload"]
    shared = shared_imports(command[0], module=mode == "module") if python_target else ()
    local_rank = not (given["no_local_rank"] or given["no_python"])
    return Options(
        target=Target(mode, command[0], command[1:], local_rank, shared),
        run_id=run_id,
        run_dir=str(folder),
        grace_s=grace,
        heartbeat_s=given["heartbeat"],
        python=python_there(given["venv"], given["remote_python"]),
        workdir=given["workdir"] or os.getcwd(),
        bind_cores=given["bind_cores_to_rank"],
        core_list=cores,
        connect_timeout_s=given["connect_timeout"],
        requeue=given["requeue"],
        quiet=given["quiet"],
        **{
            name: given[name]
            for name in (
                *("hostfile", "launcher", "include", "exclude", "num_nodes", "num_gpus", "master_addr"),
                *("master_port", "iface", "env", "ssh_port", "ssh_config", "ssh_accept_new"),
                *("compat", "node_rank", "pod"),
            )
        },
    )


_FOR_SSH = ("ssh_port", "ssh_config", "ssh_accept_new")
_FOR_CLUSTERS = (*_FOR_SSH, "iface", "remote_python", "venv", "min_nodes")
_NOT_BY_HAND = tuple(name for name in _FOR_CLUSTERS if name != "iface")
_NOT_IN_STEPS = ("include", "exclude", "num_nodes", "max_restarts")


def _refuse_without_effect(launcher: Launcher, allocation: Allocation | None, given: dict[str, Any]) -> None:
    """An option that would do nothing is a mistake."""
    pointless = {
        "local": _FOR_CLUSTERS,
        "step": (*_FOR_CLUSTERS, *_NOT_IN_STEPS),
        "hand": (*_NOT_BY_HAND, "max_restarts"),
    }.get(launcher, ())
    for name in pointless if launcher != "slurm" else _FOR_SSH:
        if given[name]:
            why = "it needs a --hostfile or a SLURM job of several nodes"
            if launcher == "step":
                why = "srun has started this task and decides; start zlaunch by sbatch or salloc for it"
            elif launcher == "hand":
                why = "every node is started by itself here, and knows no other"
            raise click.UsageError(f"--{name} has no effect here: {why}")
    if given["requeue"] and allocation is None:
        raise click.UsageError("--requeue: this is not inside a SLURM job")


def _allocation() -> Allocation | None:
    if "SLURM_JOB_ID" not in os.environ:
        return None
    from zlaunch.slurm.commands import granted_gpus
    from zlaunch.slurm.environment import SlurmError, read, with_gpus

    try:
        allocation = read(os.environ, has_terminal=has_terminal())
        if allocation is None or all(node.gpus is not None for node in allocation.nodes):
            return allocation
        return with_gpus(allocation, granted_gpus(allocation.job_id))
    except SlurmError as error:
        raise click.UsageError(str(error)) from None


def _prepare(
    options: Options, launcher: Launcher, allocation: Allocation | None, min_nodes: int | None
) -> tuple[Job, Plan | None, str]:
    """The job, its plan as far as it is known before the nodes have answered, and where it runs, in words."""
    if launcher in ALONE:
        own, make = _own_plan(options, launcher, allocation)
        from zlaunch.launchers.local import local_job

        where = f"{own.nodes[0].host}, rendezvous {own.master_addr}:{own.master_port}"
        return local_job(options, make), own, where
    from zlaunch.launchers.cluster import cluster

    found = cluster(options, launcher, allocation)
    plan = found.known_plan() if found.chosen is not None else None
    return found.job(min_nodes), plan, ", ".join(found.hosts())


def _own_plan(
    options: Options, launcher: Launcher, allocation: Allocation | None
) -> tuple[Plan, Callable[[int], Plan]]:
    """The first plan for this machine, and how to come to that of an attempt."""
    if launcher == "step":
        from zlaunch.launchers.srun_task import step_plan

        assert allocation is not None
        return step_plan(options, allocation), lambda n: step_plan(options, allocation, n)
    if launcher == "hand":
        from zlaunch.launchers.manual import hand_plan

        rank = options.node_rank or 0
        return hand_plan(options, rank), lambda n: hand_plan(options, rank, n)
    from zlaunch.launchers.local import local_node, local_plan

    node = local_node(options)
    first = local_plan(options, node)
    return first, lambda n: first if n == 0 else local_plan(options, node, n)


def _check_command(
    command: tuple[str, ...], *, module: bool, no_python: bool, folder: str | None
) -> Literal["script", "module", "exec"]:
    from zlaunch.plan import checks

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
    if folder is None or os.path.isdir(folder):  # a folder that only the nodes have is theirs to check
        checks.check_script(os.path.join(folder or "", command[0]))
    return "script"


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print(plan.shown())
        return
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not fit into its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    from zlaunch.view.plan_table import plan_table

    Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160, highlight=False).print(
        plan_table(plan)
    )


def _launch(
    job: Job, launcher: Launcher, why: str, where: str, ranks: list[int] | None, given: dict[str, Any]
) -> int:
    from zlaunch.launch.job import Limits, run_job
    from zlaunch.view.console import Console

    console = Console(ranks, quiet=given["quiet"])
    console.message(f"{where} (launcher {launcher}: {why})")
    console.message(f"logs in {os.path.relpath(job.run_dir)}")
    limits = Limits(
        max_restarts=given["max_restarts"],
        min_nodes=given["min_nodes"],
        heartbeat_s=0.0 if launcher in ALONE else given["heartbeat"],
        hang_timeout_s=given["hang_timeout"],
    )
    outcome = run_job(job, console, limits)
    if given["requeue"] and (outcome.save_asked or outcome.signum == signal.SIGTERM):
        from zlaunch.slurm.commands import requeue

        requeue(os.environ, console.message)
    elif launcher == "step" and outcome.signum == signal.SIGHUP:
        console.message("another task of the step has failed")
        return 0  # the step ends with that task's exit code
    elif launcher == "step" and outcome.code and not outcome.signum:
        from zlaunch.slurm.commands import cancel_step

        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        cancel_step(os.environ)  # the other tasks of the step would wait for this one for ever
    return outcome.code
