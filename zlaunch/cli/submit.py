"""`zlaunch submit`: have a run started when there are slots for it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

import zlaunch
from zlaunch.cli.commands import SETTINGS, Command, count_option, print_name, with_options
from zlaunch.cli.launch_options import LAUNCH

if TYPE_CHECKING:
    from zlaunch.slurm.script import BatchScript

QueueName = Literal["local", "slurm"]
_SLOTS = ("num_gpus", "num_nodes", "include", "exclude")
_NOT_HERE = {
    "detach": False,
    "dry_run": False,
    "as_json": False,
    "no_ssh": False,
    "node_rank": None,
    "debug": None,
}
"""Options of a run that say nothing about one that a queue starts -> what they are then."""
_ABOUT = ("priority", "after", "limit", "retries", "preemptible", "sbatch")
QUEUE_OPTION = click.option(
    "--queue",
    "chosen_queue",
    type=click.Choice(("local", "slurm")),
    help="zlaunch's own queue, or SLURM's.  [default: slurm if sbatch is configured, else local]",
)


@click.command(
    cls=Command,
    context_settings={**SETTINGS, "allow_interspersed_args": False},
    short_help="Queue a run; it starts when enough GPUs are free.",
)
@QUEUE_OPTION
@click.option(
    "--priority", type=int, default=0, metavar="N", help="Runs with a higher N start first.  [default: 0]"
)
@click.option(
    "--after", multiple=True, metavar="RUN|JOB", help="Start after this run or job succeeds; repeatable."
)
@click.option("--time", "limit", metavar="TIME", help="Time limit: 90 (minutes), 24:00:00, 2-12:00:00.")
@count_option("--retries", low=0, default=0, help="Queue the run again after a failure, up to N times.")
@click.option(
    "--preemptible",
    is_flag=True,
    help="Let a run with a higher priority interrupt this one: SIGUSR1 asks the script to save and exit.",
)
@click.option(
    "--sbatch", multiple=True, metavar="OPTION", help='SLURM: an option of sbatch, such as "-p gpu".'
)
@with_options(LAUNCH)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
@click.pass_context
def submit(
    context: click.Context, /, command: tuple[str, ...], chosen_queue: QueueName | None, **given: Any
) -> int:
    """Queue SCRIPT and print the run's name, or the job's id in SLURM.

    The options of a launch (`zlaunch --help-all`) are accepted too. The run starts when --num_gpus GPUs are
    free on --num_nodes hosts, in the order of submission. See also zlaunch queue, wait, logs -f, cancel.
    """
    asked = read_line(context, command, chosen_queue, given)
    if asked.queue == "slurm":
        return _submit_to_slurm(asked)
    job, path = enqueue(asked)
    return _told(job, path, quiet=asked.given["quiet"])


submit.params = [parameter for parameter in submit.params if parameter.name not in _NOT_HERE]


class Asked(NamedTuple):
    """Holds what a command line of `submit` asks for."""

    queue: QueueName
    command: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """Options of a run that were given: name and word of the command line."""
    given: dict[str, Any]
    """All options of a run."""
    about: dict[str, Any]
    """The options of the queue."""


def read_line(
    context: click.Context, command: tuple[str, ...], queue: QueueName | None, given: Mapping[str, Any]
) -> Asked:
    """Take a parsed command line of `submit`. Raises click.UsageError."""
    if "SLURM_JOB_ID" in os.environ:
        raise click.UsageError("this is already inside a SLURM job: run `zlaunch SCRIPT` on its nodes")
    chosen = choose_queue(queue, uses_hosts=any(given[name] for name in ("hostfile", "include", "exclude")))
    about = {name: given[name] for name in _ABOUT}
    if chosen == "local" and about["sbatch"]:
        raise click.UsageError("--sbatch needs --queue slurm")
    others = {name: value for name, value in given.items() if name not in _ABOUT}
    return Asked(chosen, command, _given_options(context), {**others, **_NOT_HERE}, about)


def choose_queue(asked: QueueName | None, *, uses_hosts: bool = False) -> QueueName:
    """Return the queue that was asked for, or SLURM's where this machine can submit to it."""
    if asked is not None:
        return asked
    configured = "SLURM_CONF" in os.environ or os.path.exists("/etc/slurm/slurm.conf")
    return "slurm" if configured and not uses_hosts and shutil.which("sbatch") else "local"


def _given_options(context: click.Context) -> tuple[tuple[str, str], ...]:
    found = []
    for option in context.command.params:
        name = option.name or ""
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if (
            not isinstance(option, click.Option)
            or not given
            or name in ("chosen_queue", *_ABOUT)
            or not option.expose_value
        ):
            continue
        flag = next(word for word in option.opts if word.startswith("--"))
        value = context.params[name]
        if option.is_flag:
            found.append((name, flag))
        else:
            found += [(name, f"{flag}={each}") for each in (value if option.multiple else (value,))]
    return tuple(found)


# -- the embedded queue


def enqueue(asked: Asked) -> tuple[int, Path]:
    """Add a run to the embedded queue; return the job's number and the run's folder.

    Raises click.UsageError and LaunchError.
    """
    from zlaunch.cli.run import prepare
    from zlaunch.queue.daemon import check_daemon, queue_folder
    from zlaunch.queue.process_settings import ProcessSettings
    from zlaunch.queue.schedule import find_demand
    from zlaunch.queue.store import QueuedJob, Store, Submission
    from zlaunch.slurm.script import time_limit_s
    from zlaunch.supervisor import run_folder
    from zlaunch.supervisor.detach import CONSOLE_LOG
    from zlaunch.supervisor.end import End
    from zlaunch.supervisor.found_runs import find_run, meant
    from zlaunch.supervisor.run_folder import make_run_dir
    from zlaunch.system.processes import python_module_argv, uninterrupted

    _, command, options, given, about = asked
    if given["requeue"]:
        raise click.UsageError(
            "--requeue needs --queue slurm; zlaunch's queue has --preemptible and --retries"
        )
    known = Store(queue_folder())
    after = tuple(
        found.submission.run_dir
        if run.isdecimal() and isinstance(found := known.find(int(run)), QueuedJob)
        else str(find_run(meant(run)).path.resolve())
        for run in about["after"]
    )
    limit = None if about["limit"] is None else time_limit_s(about["limit"])
    launcher = prepare(command, dict(given)).launcher
    launch = launcher.launch
    demand, names = find_demand(launcher)
    path = Path(launch.run_dir).resolve()
    check_daemon(queue_folder())  # before anything is there that could be started later
    submission = Submission(
        run_id=launch.run_id,
        run_dir=str(path),
        options=tuple(word for name, word in options if name not in (*_SLOTS, "run_dir", "run_id")),
        command=command,
        cwd=os.getcwd(),
        umask=_umask(),
        demand=demand,
        names=names,
        priority=about["priority"],
        after=after,
        time_s=limit,
        retries=about["retries"],
        preemptible=about["preemptible"],
        grace_s=launch.grace_s,
        heartbeat_s=launcher.run.heartbeat_s,
        starter=python_module_argv("zlaunch.cli.queued"),
        path=str(Path(zlaunch.__file__).parent),
        settings=ProcessSettings.of_this_process(),
    )
    per_node = demand.per_node or max(map(len, demand.pool.values()))
    line = [*(word for _, word in options), *command]
    environ = {name: value for name, value in os.environ.items() if name != "ZLAUNCH_RUN_ID"}
    with uninterrupted():  # what is marked as queued is in the queue
        lock = make_run_dir(path)
        assert lock is not None
        if (path / "launcher.json").exists():
            raise click.UsageError(
                f"--run_dir {given['run_dir']}: the folder already contains a run: use another one"
            )
        nodes = tuple(demand.pool)[: demand.nodes]
        workers = demand.nodes * per_node
        labels = run_folder.Labels(launch.name, launch.tags)
        run_folder.queued(str(path), launch.run_id, nodes, workers, line, labels)
        (path / CONSOLE_LOG).touch()
        os.close(lock)  # the next to hold it is the run's launcher
        try:
            job = known.add(submission, environ)
        except BaseException:
            run_folder.left_queue(path, End(2, "refused"))
            raise
    return job, path


def _told(job: int, path: Path, *, quiet: bool) -> int:
    """Say what the run is called, and have it started."""
    from zlaunch.queue.daemon import queue_folder, replace_older_daemon
    from zlaunch.supervisor.detach import ended_at_logout
    from zlaunch.supervisor.run_folder import name_of

    name = name_of(path)
    print_name(name)
    if not quiet:
        queue = "queue --queue local" if choose_queue(None) == "slurm" else "queue"
        print(
            f"zlaunch: job {job} of the queue: zlaunch {queue}, wait {name}, cancel {name}", file=sys.stderr
        )
    replace_older_daemon(queue_folder())
    if advice := ended_at_logout():
        print(f"zlaunch: warning: {advice}", file=sys.stderr)
    return 0


def _umask() -> int:
    known = os.umask(0o077)
    os.umask(known)
    return known


# -- SLURM


def _submit_to_slurm(asked: Asked) -> int:
    from zlaunch.cli.slurm import warn_of_one_core
    from zlaunch.slurm.commands import submit as hand_over
    from zlaunch.slurm.script import render

    batch = batch_of(asked)
    with tempfile.TemporaryDirectory(prefix="zlaunch-") as folder:  # sbatch keeps a copy
        path = Path(folder, f"{Path(batch.script).stem or 'job'}.sbatch")
        path.write_bytes(os.fsencode(render(batch)))
        job = hand_over(path)
    print(job)
    if not asked.given["quiet"]:
        warn_of_one_core(batch)
        print(f"zlaunch: job {job} of SLURM: zlaunch queue, cancel {job}; slurm-{job}.out", file=sys.stderr)
    return 0


def batch_of(asked: Asked) -> BatchScript:
    """Return the sbatch file of a run. Raises click.UsageError and LaunchError."""
    from zlaunch.cli.run import check_command
    from zlaunch.cli.slurm import with_cores
    from zlaunch.plan.checks import check_configs
    from zlaunch.plan.world_sizes import possible_world_sizes
    from zlaunch.slurm.commands import has_gpus
    from zlaunch.slurm.script import BatchScript

    _, command, options, given, about = asked
    for name, instead in (
        ("priority", 'SLURM has its own: --sbatch "--nice=N" or --sbatch "--qos=NAME"'),
        ("retries", "--max_restarts N tries again within the job"),
    ):
        if about[name]:
            raise click.UsageError(f"--{name} needs --queue local: {instead}")
    for name in ("include", "exclude", "hostfile"):
        if given[name]:
            raise click.UsageError(f"--{name} needs --queue local: SLURM chooses the nodes")
    for run in about["after"]:
        if not run.isdecimal():
            raise click.UsageError(f"--after {run}: --queue slurm needs a SLURM job ID")
    check_command(command, module=given["module"], no_python=given["no_python"], folder=given["workdir"])
    count = given["num_gpus"]
    nodes = given["num_nodes"] or 1
    # Warnings are rank 0's to say.
    slots = (count,) * nodes if count else ()
    spares = min(given["spares"] or 0, nodes - 1)
    world_sizes = possible_world_sizes(slots, spares, given["min_nodes"]) if slots else ()
    check_configs(command, module=given["module"], folder=given["workdir"], world_sizes=world_sizes)
    gpus = count if count is not None and has_gpus() else None
    words = [
        word for name, word in options if name not in ("num_nodes", "requeue", "num_gpus" if gpus else "")
    ]
    extra = [*about["sbatch"]]
    if about["after"]:
        extra.append(f"--dependency=afterok:{':'.join(about['after'])}")
    batch = BatchScript(
        script=command[0],
        script_args=command[1:],
        zlaunch_args=tuple(words),
        nodes=nodes,
        gpus_per_node=gpus,
        time=about["limit"],
        job_name=given["name"] or Path(command[0]).stem or None,
        python=sys.executable,
        requeue=given["requeue"] or about["preemptible"],
        sbatch=tuple(extra),
    )
    return with_cores(batch)
