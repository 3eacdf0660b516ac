"""`zlaunch [options] script.py [script args...]`: run a script on every slot."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from zlaunch import __version__
from zlaunch.cli.commands import SETTINGS, SUBCOMMANDS, print_name, with_options
from zlaunch.cli.launch_command import OTHER_FLAGS, LaunchCommand, help_all_option
from zlaunch.cli.launch_options import LAUNCH
from zlaunch.errors import LaunchError, NodeError
from zlaunch.launchers import registry
from zlaunch.plan.options import Launch, Program, python_there
from zlaunch.system.machine import discover
from zlaunch.system.processes import signal_name

if TYPE_CHECKING:
    from zlaunch.launchers.arrival import Arrival
    from zlaunch.launchers.base import Launcher
    from zlaunch.plan.plan import Plan
    from zlaunch.runtime.config import MeshShape
    from zlaunch.slurm.environment import Allocation

_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}
_ENDS_WITH_JOB = "a job ends with the command that it was started for: leave it out"
_NOT_DEBUGGED = {
    "detach": "the address of the debugger is printed here",
    "no_python": "only Python can be debugged",
    "max_restarts": "each attempt would wait for a debugger",
}
"""Option -> why it does not go with --debug."""
_AS_GIVEN = (
    *("venv", "remote_python", "hostfile", "launcher", "include", "exclude", "num_nodes", "num_gpus"),
    *("master_addr", "master_port", "iface", "env", "ssh_port", "ssh_config", "ssh_accept_new", "compat"),
    *("requeue", "max_restarts", "first_attempt", "min_nodes", "health", "exclude_unhealthy", "profile"),
    *("quiet", "verbose", "detach", "dry_run", "as_json", "parent", "node_rank", "pod"),
)
"""Options whose values a Launch takes as they are."""
_EPILOG = "To run a script that has the name of a command, write its path: zlaunch ./ps"


@click.command(cls=LaunchCommand, context_settings=_SETTINGS, epilog=_EPILOG)
@with_options(LAUNCH)
@help_all_option
@click.version_option(__version__, message="zlaunch %(version)s")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(command: tuple[str, ...], **given: Any) -> int:
    """Run your PyTorch script on every GPU: one machine, a list of hosts, or a SLURM job. If a worker fails,
    zlaunch stops the rest and says which and why.

    zlaunch's options go before SCRIPT. Everything after SCRIPT goes to the script unchanged. Option names may
    contain dashes or underscores: --num-gpus is --num_gpus. `zlaunch run SCRIPT` means `zlaunch SCRIPT`.
    Without a GPU the workers run on the CPU.
    """
    if given["as_json"] and not given["dry_run"]:
        raise click.UsageError("--json goes with --dry_run")
    chosen = prepare(command, given)
    launch = chosen.launcher.launch
    plan = chosen.plan
    from zlaunch.plan.checks import check_shown_local_ranks, parse_shown_ranks

    shown_ranks = parse_shown_ranks(launch.log_ranks, chosen.world_size)
    if plan is not None:
        check_shown_local_ranks(launch.local_ranks, plan)
    if launch.dry_run:
        _show(chosen)
        return 0
    return _start(chosen, shown_ranks)


# -- launch -----------------------------------------------------------------------------------------
#
# Make the Launch of a command line, and choose its launcher.


def launch_of(command: tuple[str, ...], given: Mapping[str, Any], allocation: Allocation | None) -> Launch:
    """Return what a command line asks for. Prints notes and warnings about it.

    Raises click.UsageError and LaunchError.
    """
    from zlaunch.launchers.found import take_pod
    from zlaunch.plan.checks import check_port, how_to_bind, parse_cores, shared_imports

    mode, given = _checked(command, given)
    take_pod(given, allocation)
    grace = given["grace"] if given["grace"] is not None else 25.0 if given["requeue"] else 3.0
    for name, value in (
        ("grace", grace),
        ("heartbeat", given["heartbeat"]),
        ("hang_timeout", given["hang_timeout"]),
    ):
        if not math.isfinite(value):
            raise click.UsageError(f"--{name}: not a number of seconds")
    check_port(given["master_port"])
    cores = parse_cores(given["bind_core_list"]) if given["bind_core_list"] is not None else None
    run_id = given["run_id"] or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    # A debugged run's workers change torch while they import it.
    is_python = mode != "exec" and not given["no_preload"] and given["debug"] is None
    shared = shared_imports(command[0], module=mode == "module") if is_python else ()
    local_rank = not (given["no_local_rank"] or given["no_python"])
    python_there(given["venv"], given["remote_python"])  # refuses both
    local_ranks = given.get("local_ranks")
    arrival: Arrival | None = given.get("arrival")
    return Launch(
        program=Program(mode, command[0], command[1:], local_rank, shared),
        run_id=run_id,
        run_dir="" if given["run_dir"] is None else str(Path(given["run_dir"]).absolute()),
        workdir=given["workdir"] or os.getcwd(),
        grace_s=grace,
        heartbeat_s=given["heartbeat"],
        # A rank that stands at a breakpoint writes nothing.
        hang_timeout_s=given["hang_timeout"] if given["debug"] is None else 0.0,
        bind=how_to_bind(given["bind"], given["bind_cores_to_rank"], has_list=cores is not None),
        core_list=cores,
        connect_timeout_s=given["connect_timeout"],
        spares=given["spares"] or 0,
        name=given["name"] or "",
        tags=given["tag"],
        log_ranks=given["log_ranks"] or "0",
        local_ranks=None if local_ranks is None else tuple(local_ranks),
        log_bytes=None if given["log_max_mb"] is None else given["log_max_mb"] * 1_000_000,
        debug_rank=given["debug"],
        virtual_local_rank=given.get("virtual_local_rank", False),
        configs=tuple(given.get("configs", ())),
        arrival_run=None if arrival is None else arrival.run,
        is_meeting_point=arrival is not None and arrival.is_own,
        **{name: given[name] for name in _AS_GIVEN},
    )


def _checked(
    command: tuple[str, ...], given: Mapping[str, Any]
) -> tuple[Literal["script", "module", "exec"], dict[str, Any]]:
    """Check what can be checked of a command line without looking around. Return what the command is, and the
    options with the flags of other launchers translated.
    """
    # what accelerate and DeepSpeed's own wrappers pass for nothing
    nothing = {name: None for name in ("hostfile", "run_dir") if given[name] == "None"}
    given = {**given, **nothing}
    if OTHER_FLAGS in given:
        from zlaunch.cli.flags import take_flags

        given |= {**take_flags(given), "num_processes": given["num_processes"]}
    if not given["quiet"]:
        for note in given.get("notes", ()):
            print(f"zlaunch: {note}", file=sys.stderr)
    given["no_ssh"] = given["no_ssh"] or given["node_rank"] is not None
    if given["no_ssh"] and given["node_rank"] is None:
        raise click.UsageError("--no_ssh and --node_rank N require each other")
    for name in ("master_addr", "run_dir"):
        if given[name] is not None and not given[name].strip():
            raise click.UsageError(f"--{name} is empty")
    given["quiet"] = given["quiet"] or given["log_level"] in ("error", "critical")
    if given["include"] is not None and given["exclude"] is not None:
        raise click.UsageError("--include and --exclude cannot be used together")
    from zlaunch.plan.checks import launch_options_of_the_script

    module = given["module"]
    mode = check_command(command, module=module, no_python=given["no_python"], folder=given["workdir"])
    if not given["quiet"] and (misplaced := launch_options_of_the_script(command, module=module)):
        print(f"zlaunch: warning: {misplaced}", file=sys.stderr)
    return mode, given


class Chosen(NamedTuple):
    """Holds what a command line has come to, before anything is started."""

    launcher: Launcher
    why: str
    """Why it is this launcher."""
    plan: Plan | None
    """The plan as far as it is known."""
    warnings: Sequence[str]
    """About the config."""

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks, if it is known."""
        return self.plan.world_size if self.plan is not None else None


def prepare(command: tuple[str, ...], given: Mapping[str, Any]) -> Chosen:
    """Check a command line and choose its launcher. Raises click.UsageError and LaunchError."""
    from zlaunch.slurm.commands import own_allocation

    allocation = own_allocation(os.environ)
    launch = launch_of(command, given, allocation)
    try:
        return _choose(launch, allocation)
    except NodeError as error:
        _note_refusal(launch, error)
        raise
    except LaunchError as error:
        if OTHER_FLAGS not in given:
            raise
        from zlaunch.cli.flags import name_as_typed

        raise name_as_typed(error, given) from None


def _choose(launch: Launch, allocation: Allocation | None) -> Chosen:
    from zlaunch.plan.checks import check_configs

    name, why = registry.choose(launch, allocation)
    kind = registry.load(name)
    for option, reason in kind.refuses.items():
        if getattr(launch, option):  # an option that would do nothing is a mistake
            raise click.UsageError(f"--{option} has no effect here: {reason}")
    if launch.detach and (allocation is not None or launch.pod):
        raise click.UsageError(f"--detach: {_ENDS_WITH_JOB}")
    if launch.debug_rank is not None:
        is_used = {
            "detach": launch.detach,
            "no_python": launch.program.mode == "exec",
            "max_restarts": launch.max_restarts > 0,
        }
        for option, reason in _NOT_DEBUGGED.items():
            if is_used[option]:
                raise click.UsageError(f"--debug and --{option} cannot be used together: {reason}")
    if launch.requeue and allocation is None:
        raise click.UsageError("--requeue works only inside a SLURM job")
    if not launch.run_dir:
        folder = kind.default_run_dir(launch.run_id, allocation)
        launch = replace(launch, run_dir=str(folder.absolute()))
    launcher = kind(launch, allocation)
    plan = launcher.known_plan()
    count = len(launcher.hosts)
    spares = launch.spares
    if spares >= count:
        raise click.UsageError(f"--spares {spares}: at least one of the {count} hosts must not be a spare")
    if launch.min_nodes is not None and launch.min_nodes > count - spares:
        besides = f" besides {spares} spare ones" if spares else ""
        raise click.UsageError(f"--min_nodes {launch.min_nodes}: there are {count - spares} hosts{besides}")
    if launch.exclude_unhealthy and launch.min_nodes is None and not spares:
        raise click.UsageError("--exclude_unhealthy needs --min_nodes N or --spares N")
    warnings = check_configs(
        launch.checked_command,
        module=launch.program.mode == "module",
        folder=launch.other_folder,
        world_sizes=launcher.world_sizes,
    )
    granted = allocation.nodes[0].gpus if allocation is not None and launcher.name == registry.LOCAL else 0
    if granted and not discover(os.environ).tokens:
        from zlaunch.launchers.base import unseen_gpus  # imports what a run needs, and --help does not

        print(f"zlaunch: warning: {unseen_gpus(granted)}", file=sys.stderr)
    if launch.arrival_run is not None and launch.debug_rank is not None and launch.num_gpus:
        # This node may get that rank, and is refused here if so.
        _numbered(launcher, launch.debug_rank // launch.num_gpus)
    return Chosen(launcher, why, plan, warnings)


def _numbered(launcher: Launcher, number: int) -> Launcher:
    """Return the launcher for a number that this node gets when it arrives."""
    return type(launcher)(replace(launcher.launch, node_rank=number), launcher.allocation)


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        print(f"zlaunch: {text}", file=sys.stderr)


def check_command(
    command: tuple[str, ...], *, module: bool, no_python: bool, folder: str | None
) -> Literal["script", "module", "exec"]:
    """Return what the command is. Raises click.UsageError where there is no such script."""
    from zlaunch.plan import checks

    if not command or not command[0]:
        raise click.UsageError("no script given: zlaunch SCRIPT [ARGS]; `zlaunch -h` shows the options")
    if module and no_python:
        raise click.UsageError("--module and --no_python cannot be used together")
    if module:
        checks.check_module(command[0])
        return "module"
    if no_python:
        checks.check_program(command[0])
        return "exec"
    if folder is None or os.path.isdir(folder):  # a folder that only the nodes have is theirs to check
        path = os.path.join(folder or "", command[0])
        if not os.path.exists(path):
            from zlaunch.cli.other_words import meant_command

            if advice := meant_command(command, SUBCOMMANDS):
                raise click.UsageError(f"no script {command[0]!r}: {advice}")
        checks.check_script(path, SUBCOMMANDS)
    return "script"


def _note_refusal(launch: Launch, error: NodeError) -> None:
    """Write down that a queued run was refused before it began: its host may have lost a GPU since it was
    submitted. Then the queue tries another one.
    """
    from zlaunch.supervisor import run_folder
    from zlaunch.supervisor.end import End

    run_dir = launch.run_dir
    known = run_folder.read(run_dir) if run_dir and run_folder.is_queued(run_dir) else None
    if known is not None and known.run_id == launch.run_id and not launch.dry_run:
        run_folder.begun(run_dir, launch.run_id, [error.host], 0, launch.first_attempt)
        run_folder.ended(run_dir, End.refused_by([error]))


# -- dry run ----------------------------------------------------------------------------------------


def _show(chosen: Chosen) -> None:
    """Print the plan. Raises click.UsageError."""
    from zlaunch.plan.checks import find_mesh, names_no_config

    launcher = chosen.launcher
    launch = launcher.launch
    if chosen.plan is None:
        raise click.UsageError(
            "--dry_run: how many workers each node has is only known at launch. Give --num_gpus N, or "
            "slots=N for each host of the hostfile"
        )
    mesh = find_mesh(
        launch.checked_command,
        module=launch.program.mode == "module",
        folder=launch.other_folder,
        world_size=chosen.plan.run_world_size,
    )
    _print_plan(launcher, chosen.plan, mesh, as_json=launch.as_json)
    if launcher.spans_nodes:
        note = "addresses, interfaces, cores and GPUs are filled in when the nodes have answered"
        print(f"zlaunch: {note}", file=sys.stderr)
    is_python = launch.program.mode != "exec"
    if is_python and names_no_config(
        launch.checked_command, module=launch.program.mode == "module", folder=launch.other_folder
    ):
        note = "no config among the script's arguments, so none was checked"
        print(f"zlaunch: {note}. If the script names one, run: zlaunch config check FILE", file=sys.stderr)
    for warning in chosen.warnings:  # in a run rank 0 says them
        print(f"zlaunch: warning: {warning}", file=sys.stderr)


def _print_plan(launcher: Launcher, plan: Plan, mesh: MeshShape | None, *, as_json: bool) -> None:
    if as_json:
        print(plan.shown())
        return
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not fit into its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    from zlaunch.cli.tables import stdout_console
    from zlaunch.view.plan_table import plan_table

    stdout_console().print(
        plan_table(plan, mesh, spares=launcher.spare_hosts, min_nodes=launcher.launch.min_nodes)
    )


# -- start ------------------------------------------------------------------------------------------


def _take_number(arrival: Arrival, launch: Launch) -> tuple[int, bool]:
    """Wait for the other nodes. Return this one's number, and whether a signal asked to save meanwhile.

    Raises LaunchError, and click's Exit after a signal that stops the run.
    """
    from zlaunch.supervisor.job import Stopped, pre_run_signals

    say = partial(_say, quiet=launch.quiet)
    try:
        with pre_run_signals() as signals:
            number = arrival.number(launch.connect_timeout_s, say)
            return number, signals.save_asked
    except Stopped as stopped:
        say(f"stopped by {signal_name(stopped.signum)}")
        raise click.exceptions.Exit(128 + stopped.signum) from None


def _start(chosen: Chosen, ranks: list[int] | None) -> int:
    """Run a launch to its end, or in the background, and return the exit code."""
    from zlaunch.launchers.arrival import Arrival
    from zlaunch.supervisor import run_folder
    from zlaunch.supervisor.job import run_job
    from zlaunch.supervisor.provenance import Provenance
    from zlaunch.supervisor.run_folder import drop_unused, make_run_dir, point_latest
    from zlaunch.system.processes import die_with_parent
    from zlaunch.view.console import Console

    launcher = chosen.launcher
    launch = launcher.launch
    if launch.parent is not None:
        die_with_parent(launch.parent, signal.SIGTERM)
    run_dir = launch.run_dir
    is_own_folder = launch.run_id == Path(run_dir).name
    is_used = not (is_own_folder or launch.first_attempt or launcher.shares_run_dir)
    replaces = is_used and Path(run_dir, "events.jsonl").exists()
    # The lock is kept for as long as this process lives.
    make_run_dir(Path(run_dir), shared=launcher.shares_run_dir)
    save_asked = False
    if (arrival := Arrival.of(launch)) is not None:
        # nothing refuses this launch any more: only now the other nodes count on it
        try:
            number, save_asked = _take_number(arrival, launch)
            launcher = _numbered(launcher, number)
        except BaseException:
            if is_own_folder:
                drop_unused(Path(run_dir))
            raise
    if is_own_folder:
        point_latest(Path(run_dir))
    if launch.detach and not _goes_on_alone(launcher):
        return 0
    plan = launcher.known_plan()
    _begin(launcher, launch.first_attempt)
    console = Console(
        ranks,
        local_ranks=launch.local_ranks,
        role=launch.worker_env.get("ROLE_NAME", "rank"),
        quiet=launch.quiet,
        verbose=launch.verbose,
    )
    console.message(f"{launch.program.name} on {launcher.where}")
    console.detail(f"launcher {launcher.name}: {chosen.why}")
    if plan is not None and plan.master_addr:
        console.detail(f"rendezvous at {plan.master_addr}:{plan.master_port}")
    replaced = " (replacing those of an earlier run)" if replaces else ""
    console.message(f"logs in {os.path.relpath(run_dir)}{replaced}")
    if launch.debug_rank is not None:
        from zlaunch.supervisor.debugger import LIFTED

        console.message(f"--debug {launch.debug_rank}: {LIFTED}")
    if plan is not None and all(worker.rank for node in plan.nodes for worker in node.workers):
        provenance = None  # the launcher of rank 0 writes it
    else:
        record = run_folder.read(run_dir)
        command = record.command if record is not None else ()
        provenance = Provenance(launch, command)
        provenance.begin()
    outcome = run_job(launcher, console, provenance, save_asked=save_asked)
    if provenance is not None:
        for problem in provenance.end():
            console.error(f"{problem}; the run's record is incomplete")
    return launcher.on_end(outcome, console.message)


def _begin(launcher: Launcher, attempt: int = 0) -> None:
    """Record that this process runs the launch."""
    from zlaunch.supervisor import run_folder
    from zlaunch.supervisor.run_folder import Labels

    launch = launcher.launch
    plan = launcher.known_plan()
    world = plan.world_size if plan is not None else 0
    labels = Labels(launch.name, launch.tags)
    run_folder.begun(launch.run_dir, launch.run_id, launcher.hosts, world, attempt, labels=labels)


def _goes_on_alone(launcher: Launcher) -> bool:
    """Say the run's name and go on in a process of its own: True there, False in the one that may end."""
    from zlaunch.supervisor.detach import ended_at_logout, into_background
    from zlaunch.supervisor.run_folder import name_of

    path = Path(launcher.launch.run_dir)
    name = name_of(path)
    if into_background(path, lambda: _begin(launcher)):
        return True
    print_name(name)
    if not launcher.launch.quiet:
        print(
            f"zlaunch: it continues in the background: zlaunch attach {name}, logs -f, wait, stop",
            file=sys.stderr,
        )
    if advice := ended_at_logout():
        print(f"zlaunch: warning: {advice}", file=sys.stderr)
    return False
