"""`zlaunch submit`: have a run started when there are slots for it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option, print_name, with_options
from zlaunch.cli.launch_options import LAUNCH
from zlaunch.queue.submit import QueueName, SubmitRequest, check_for_slurm, choose_queue, enqueue
from zlaunch.queue.submit import batch_of as plain_batch

if TYPE_CHECKING:
    from zlaunch.launchers.base import Launcher
    from zlaunch.slurm.script import BatchScript

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
    request = read_line(context, command, chosen_queue, given)
    if request.queue == "slurm":
        return _submit_to_slurm(request)
    job, path = enqueue(request, prepare_launcher)
    return _told(job, path, quiet=request.given["quiet"])


submit.params = [parameter for parameter in submit.params if parameter.name not in _NOT_HERE]


def read_line(
    context: click.Context, command: tuple[str, ...], queue: QueueName | None, given: Mapping[str, Any]
) -> SubmitRequest:
    """Take a parsed command line of `submit`. Raises click.UsageError."""
    if "SLURM_JOB_ID" in os.environ:
        raise click.UsageError("this is already inside a SLURM job: run `zlaunch SCRIPT` on its nodes")
    chosen = choose_queue(queue, uses_hosts=any(given[name] for name in ("hostfile", "include", "exclude")))
    about = {name: given[name] for name in _ABOUT}
    if chosen == "local" and about["sbatch"]:
        raise click.UsageError("--sbatch needs --queue slurm")
    others = {name: value for name, value in given.items() if name not in _ABOUT}
    return SubmitRequest(chosen, command, _given_options(context), {**others, **_NOT_HERE}, about)


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


# -- zlaunch's own queue


def prepare_launcher(request: SubmitRequest) -> Launcher:
    """Return the launcher of a run. Raises click.UsageError and LaunchError."""
    from zlaunch.cli.run import prepare

    return prepare(request.command, request.given).launcher


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


# -- SLURM


def _submit_to_slurm(request: SubmitRequest) -> int:
    from zlaunch.cli.slurm import warn_of_options
    from zlaunch.slurm.commands import submit as hand_over
    from zlaunch.slurm.script import render

    batch = batch_of(request)
    with tempfile.TemporaryDirectory(prefix="zlaunch-") as folder:  # sbatch keeps a copy
        path = Path(folder, f"{Path(batch.script).stem or 'job'}.sbatch")
        path.write_bytes(os.fsencode(render(batch)))
        if not request.given["quiet"]:
            warn_of_options(batch, asks_for_gpus=False)
        job = hand_over(path, shown=f"the job of {batch.script}")
    print(job)
    if not request.given["quiet"]:
        print(f"zlaunch: job {job} of SLURM: zlaunch queue, cancel {job}; slurm-{job}.out", file=sys.stderr)
    return 0


def batch_of(request: SubmitRequest) -> BatchScript:
    """Return the sbatch file of a run. Raises click.UsageError and LaunchError."""
    from zlaunch.cli.run import check_command
    from zlaunch.cli.slurm import with_cores

    check_for_slurm(request)
    given = request.given
    module = given["module"]
    check_command(request.command, module=module, no_python=given["no_python"], folder=given["workdir"])
    return with_cores(plain_batch(request))
